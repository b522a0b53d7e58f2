"""The privacy lab: attacks on the messages that a run has recorded, and what they show.

Attacker and judge are two objects. The attacker has recorded messages, networks and auxiliary images. The judge alone
has the originals.
"""
