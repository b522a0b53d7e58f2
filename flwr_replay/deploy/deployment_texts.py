"""The texts of a deployment's files; `<<name>>` stands for a value. They are Python since a bundle holds no scripts."""

from flwr_replay.report.uploads import RECONSTRUCT

__all__ = [
    "CLINIC",
    "COORDINATOR",
    "LEAVES",
    "MAKE_SEAL_KEY",
    "MASKED_POLICY",
    "MASKED_STUDY",
    "PEERS",
    "POLICY",
    "SCRIPTS_OF_CLINIC",
    "SCRIPTS_OF_COORDINATOR",
    "SEALED_POLICY",
    "SEALED_STEP",
    "SEALED_STUDY",
    "SEAL_KEYS",
    "STAYS",
    "STUDY",
]

STAYS = "Your images stay in this building."
LEAVES = {  # by the kind of field, the gravest first
    "per-sample-raw": "Some of your images leave this building as they are, with their labels, for all the others.",
    "per-sample": f"Your images stay in this building. Numbers that were computed from every single one leave. {RECONSTRUCT}",
    "synthetic": "Your images stay in this building. Images leave that a generator drew after them; they may resemble yours.",
}

STUDY = """\
# One study: the whole of what the institutions agree on. It holds no code: server and institutions run the
# flwr-replay that is installed at each of them. It must be the same file everywhere.
[project]
name = "study"
version = "1.0.0"
description = "A study of flwr-replay."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "flwr-replay"

[tool.flwr.app.components]
serverapp = "flwr_replay.server_app:app"
clientapp = "flwr_replay.client_app:app"

[tool.flwr.app.config]
nodes = {nodes}
rounds = {rounds}
runs-dir = ""
run-name = ""
resume = ""
overrides = ""
{options}
"""

POLICY = """\
# A proposal by the coordinator: the least that this study needs. This file is the clinic's own word, so read it and
# change what you do not agree with. docs/examples/hospitals/policy.yaml explains every key. Look at what would leave
# before you start: README.md has the command. An unknown key is an error, and then nothing leaves at all.
strategies: [{strategy}]
kinds: [{kinds}]
max-upload-mb: {upload}
metrics: {metrics}
max-evaluations: {tests}
recording: false
{agreed}{sealed}"""

SEALED_POLICY = """\
# No run in which the server could read weights.
sealed: true
"""

MASKED_POLICY = """\
# No run in which the server could read this clinic's weights alone.
masked: true
"""

PEERS = """\
# The pinned keys: a line for each clinic, its name and its public key, as ./make-key.sh prints it. Without your own line,
# and with another key for anybody, this clinic takes no part. The same file at every clinic: compare its digest by
# telephone, with the other clinics, not with the coordinator: flwr-replay deploy seal-key {name} --peers peers.txt
"""

SEALED_STUDY = "The run is sealed: the server cannot read what the clinics send each other."
MASKED_STUDY = "The run is masked: of weights the server reads the mean of all clinics, and no single clinic's."
SEALED_STEP = """
   <<hidden>> `make-key.sh` also makes `seal.key`, which
   never leaves this folder, and prints a line for `peers.txt`. Give that line to every other clinic, and not through the
   coordinator, who could put a key of its own in its place. Put all lines into `peers.txt`, your own too. Then compare,
   by telephone, the digest that this prints at every clinic:
   `flwr-replay deploy seal-key <<name>> --peers peers.txt`
"""

COORDINATOR = """\
# At the coordinator

The study is between <<clinics>>. They reach this machine at <<address>>. This folder is for you alone.

1. Install flwr-replay <<replay_version>> here. From a checkout: `pip install .`; or `uv sync` there, and then, in every
   new terminal, `. .venv/bin/activate`. `flwr-replay doctor` shows whether its programs are found. Tell the clinics where
   to get the same version.
2. Send each clinic its folder, which lies beside this one. It holds no secret. Let the clinics check with you, by
   telephone, the SHA-256 of `ca.crt`: `sha256sum certificates/ca.crt`.
3. Each clinic makes its own key, and sends you the public half, `NAME.pub`. Put these files into `keys/`, and compare
   fingerprints by telephone: `ssh-keygen -l -f keys/NAME.pub`. Never take a private key from a clinic.
4. Start the SuperLink, in a terminal of its own, and leave it running: `./superlink.sh`
5. Register the keys that have come. This can be repeated: `./register.sh`
6. When all clinics have started, `./run.sh` starts the run and shows it. It ends with a summary; the results are
   in `runs/`. Ctrl-C ends the output, not the run.
7. What is wrong: `flwr-replay doctor --deployment .` looks at certificates, keys, the SuperLink, SuperNodes, runs and the
   disk, and says how an interrupted run goes on: `./run.sh runs/NAME/resume.toml`, with the options that it began with.
8. Ctrl-C in the SuperLink's terminal stops it, between runs. Registered keys and finished runs are still there when you
   start it again. To end a run: `. ./connect.sh`, `flwr list superlink`, `flwr stop RUN_ID superlink`.

Other options, for one run: `./run.sh --run-config 'rounds=15 overrides="momentum=0.5 wait=600"'`. What `study/pyproject.toml`
names is changed by its name, all else goes into `overrides`.

`certificates/server.key` is this server's secret: it stays here. The certificates are valid for <<days>> days, until
<<ends>>. The key that signed them was thrown away; for another address, or later, make a new folder.

Whoever reaches the port can register keys and send runs. Let your firewall admit the clinics' addresses only.
"""

SCRIPTS_OF_COORDINATOR = {
    "superlink.sh": """\
#!/bin/sh
# Starts the SuperLink, which the clinics reach at <<address>>.
set -eu
cd "$(dirname "$0")"
umask 077
export FLWR_HOME="$PWD/flower"
export FLWR_TELEMETRY_ENABLED=0
mkdir -p "$FLWR_HOME"
exec flower-superlink --host <<listen>> --port <<port>> --database superlink.db \\
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.crt --ssl-keyfile certificates/server.key \\
  --enable-supernode-auth --disable-runtime-dependency-installation
""",
    "connect.sh": """\
# Read by register.sh and run.sh: tells Flower's `flwr` where the SuperLink is.
umask 077
export FLWR_HOME="$PWD/flower"
export FLWR_TELEMETRY_ENABLED=0
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "superlink"

[superlink.superlink]
address = "<<address>>"
root-certificates = "$PWD/certificates/ca.crt"
END
""",
    "register.sh": """\
#!/bin/sh
# Registers the clinics' public keys that lie in keys/, as soon as the SuperLink answers.
set -eu
cd "$(dirname "$0")"
. ./connect.sh
tries=4
until flwr supernode list superlink > /dev/null 2>&1; do
  tries=$((tries - 1))
  [ $tries -gt 0 ] || { echo "the SuperLink does not answer: start ./superlink.sh" >&2; exit 1; }
  echo "waiting for the SuperLink"
  sleep 5
done
for name in <<names>>; do
  if [ -e "keys/$name.registered" ]; then
    echo "$name: registered before"
  elif [ -e "keys/$name.pub" ]; then
    flwr supernode register "keys/$name.pub" superlink
    touch "keys/$name.registered"
    echo "$name: registered"
  else
    echo "$name: waiting for keys/$name.pub"
  fi
done
""",
    "run.sh": """\
#!/bin/sh
# Starts a run and shows it. Further words are options of `flwr run`, such as --run-config "rounds=15".
# ./run.sh runs/NAME/resume.toml goes on with a run that was interrupted.
set -eu
cd "$(dirname "$0")"
. ./connect.sh
case "${1-}" in
  *.toml) set -- --run-config "$1" ;;
  *) set -- --run-config "runs-dir=\\"$PWD/runs\\"" "$@" ;;
esac
flwr run study superlink --stream "$@"
""",
}

CLINIC = """\
# At <<name>>

With this folder <<name>> takes part in a study with others (<<clinics>>). <<leaves>><<private>> What leaves, and what your own
policy says to it, you can see before you start: step 5.

1. Install flwr-replay <<replay_version>> here, on a machine that can read the images and reach <<address>>. The
   coordinator says where to get it. From a checkout: `pip install .`; or `uv sync` there, and then, in every new
   terminal, `. .venv/bin/activate`. It opens no port to the outside.
2. Put your images where `data` in this folder points: `ln -s /path/to/your/images data`. Or write the path into
   `clinic.env`, after `DATA=`. The images lie in that folder or below it, of any size; they are fitted to the study's.
   Beside them is `manifest.csv`: a line `image,label,patient`, then one for each image, such as
   `scans/0001.png,Normal,P017`. A patient's images stay together: all train, all validate or all test. A column
   `split` with `train`, `val` or `test` says which; without it one patient in five tests, and one in ten of the others
   validates. Labels are written as in the study, with the same capitals.
3. Read the scripts here; they are short, and came by mail. Ask the coordinator, by telephone, for the SHA-256 of `ca.crt`, and compare: `sha256sum ca.crt`.
4. Make your key. It never leaves this folder: `./make-key.sh`. Send the coordinator the file `<<name>>.pub` only,
   and compare its fingerprint by telephone: `ssh-keygen -l -f <<name>>.pub`.<<sealed_step>>
5. Read `policy.yaml`. It decides what may leave, and is your own word. Then look at what would leave, and give the page
   to your data-protection officer:

   ```
   flwr-replay run --dry-run --study study --policy policy.yaml --clinics <<name>> task.data-dir=data
   ```

6. Check that all is there. Each line says what is right, or what to do: `flwr-replay doctor --clinic .` The line
   `connection` needs the coordinator's SuperLink to run.
7. Once the coordinator has registered your key, start, and leave it running: `./start.sh`. If it should come back by
   itself after an interruption: `until ./start.sh; do sleep 10; done`. Ctrl-C ends it.

Everything that leaves is written down first, in `state/<<name>>/ledger.jsonl`. Keep the folder `state`, and never put an
older copy of it over a newer one. `flwr-replay deploy state state/<<name>>` says what each run has left there, and removes
it when you ask. Give this folder to a user of its own, who can read the images and nothing else.
"""

MAKE_SEAL_KEY = """\
echo "a line for peers.txt, here and at every other clinic; seal.key stays here:"
flwr-replay deploy seal-key {name}
"""
SEAL_KEYS = ' seal-key=\\"$PWD/seal.key\\" seal-peers=\\"$PWD/peers.txt\\"'

SCRIPTS_OF_CLINIC = {
    "clinic.env": """\
# What start.sh and `flwr-replay doctor --clinic` read. Values with spaces stand in single quotes.
NAME=<<name>>
ADDRESS=<<address>>
DATA=data
PORT=<<local_port>>
VERSIONS='<<versions>>'
""",
    "make-key.sh": """\
#!/bin/sh
# Makes this clinic's key. `key` stays here; <<name>>.pub goes to the coordinator.
set -eu
cd "$(dirname "$0")"
umask 077
if [ -e key ]; then
  echo "there is a key already; it is left as it is" >&2
  exit 1
fi
ssh-keygen -q -t ecdsa -b 384 -N "" -C <<name>> -f key
mv key.pub <<name>>.pub
echo "send <<name>>.pub to the coordinator; key stays here"
<<make_seal_key>>""",
    "start.sh": """\
#!/bin/sh
# Starts this clinic's SuperNode. PORT is a local one, between the SuperNode and its own processes.
set -eu
cd "$(dirname "$0")"
umask 077
. ./clinic.env
data=$(cd "$DATA" && pwd -P)
export FLWR_HOME="$PWD/flower"
export FLWR_TELEMETRY_ENABLED=0
mkdir -p "$FLWR_HOME"
echo $$ > supernode.pid
exec flower-supernode --superlink "$ADDRESS" --port "$PORT" --root-certificates ca.crt \\
  --auth-supernode-private-key key \\
  --node-config "name=\\"$NAME\\" data=\\"$data\\" state=\\"$PWD/state\\" policy=\\"$PWD/policy.yaml\\"<<seal_keys>>"
""",
}
