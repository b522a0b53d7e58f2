"""The attack keeps the contract of every attack."""

from flwr_replay.check import check_attack


def test_it_keeps_the_contract():
    check_attack("myattack:attack")
