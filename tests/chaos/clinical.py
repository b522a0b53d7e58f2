"""Stop a SuperNode for a minute in the middle of its generator's training on images of clinical size.

`python tests/chaos/clinical.py ../shared/data/covid-cxr [OPTION=VALUE …]`: a folder whose manifest has a column `site`.
Every site has a SuperNode on the loopback. The one with the most images is ended once it has answered a piece of its
training, and started again later. The same run in one process, undisturbed, must end with the same bits.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from flwr_replay.data.folder import folder_rows
from flwr_replay.deploy.rehearsal import deal, supernode
from flwr_replay.engines.superlink import flwr_run, superlink
from flwr_replay.files.lines import read_lines

AWAY = 60  # seconds
OPTIONS = ("strategy=cwt", "replay=vqvae2", "rounds=2", "evaluate_every=2", "generator.piece-seconds=45")
OPTIONS += ("task=folder", "task.channels=1", "task.size=128", "model=resnet34", "model.width=16", "device=cpu")
OPTIONS += ("task.classes=3", "task.class-names=[covid,normal,pneumonia]")


def print_timed(*words):
    print(f"{time.strftime('%H:%M:%S')} ", *words, flush=True)


def pieces(ledger, site):
    """Return the messages in which a site has answered steps of its generator's training."""
    wanted = ("up", "train-generator", "steps", site)
    rows = read_lines(ledger) if ledger.exists() else []
    return [row for row in rows if tuple(row[key] for key in ("direction", "stage", "field", "institution")) == wanted]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    asked = parser.parse_args()
    rows = folder_rows(asked.data)
    images = Counter(row.site for row in rows)
    stopped, options = max(images, key=images.get), [*OPTIONS, *asked.options]
    with tempfile.TemporaryDirectory(prefix="flwr-replay-clinical-") as place, ExitStack() as stack:
        folder = Path(place)
        deal(rows, [row.site for row in rows], folder / "data")
        (folder / "flower").mkdir()
        link = stack.enter_context(superlink(folder / "flower", simulation=False))
        nodes = {site: stack.enter_context(ExitStack()) for site in images}

        def start(site):
            owned = {"name": site, "data": str(folder / "data" / site), "state": str(folder / "state" / site)}
            nodes[site].enter_context(supernode(link, site, owned))

        for site in images:
            start(site)
        run, ended = folder / "runs" / "stopped", False
        deployed = [*options, f"nodes={len(images)}", f"runs_dir='{run.parent}'", "run_name=stopped", "wait=300"]
        for line in flwr_run(link, deployed):
            print_timed(line.rstrip())
            if not ended and pieces(run / "ledger.jsonl", stopped):
                nodes[stopped].close()
                ended = True
                print_timed(
                    f"SuperNode of {stopped} ended, {len(pieces(run / 'ledger.jsonl', stopped))} pieces answered"
                )
                time.sleep(AWAY)
                start(stopped)
                print_timed("and started again")
        for node in nodes.values():
            node.close()
        print_timed({site: f"{len(pieces(run / 'ledger.jsonl', site))} pieces" for site in images})
        print_timed(*read_lines(run / "failures.jsonl"))
        alone = [*options, "partition=natural", f"task.data-dir={asked.data}", "run-name=alone"]
        command = [Path(sys.executable).with_name("flwr-replay"), "run", *alone, "--engine", "inline"]
        subprocess.run([*command, "--runs-dir", run.parent], check=True)
        same = [(run.parent / name / "models" / "global.safetensors").read_bytes() for name in ("stopped", "alone")]
        print_timed("same bits as undisturbed:", same[0] == same[1])


if __name__ == "__main__":
    main()
