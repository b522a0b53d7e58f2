"""What an honest-but-curious server makes of recorded messages; attacker and judge are two objects.

An attack gets messages, the networks they belong to, and auxiliary data. It never gets originals. Only the judge has
those (`flwr_replay.attacks.scores`). Everything here is compute on tensors: no files, no Flower, no institution.
"""
