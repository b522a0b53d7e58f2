"""A command that is killed while the clock jumps harms no run, and repeated it ends as an undisturbed one.

One for a commit; each more often, and rehearsals, by hand: `python tests/chaos/commands.py`.
"""

from chaos_commands import COMMANDS, struck_commands
from chaos_runs import moments

RNG = moments("commands")
NAME = RNG.choice([name for name in COMMANDS if name != "rehearse"])  # which takes more than half a minute each time


def test_a_killed_command_is_repeated(tmp_path):
    assert len([*struck_commands(NAME, tmp_path, RNG, 1)]) == 1
