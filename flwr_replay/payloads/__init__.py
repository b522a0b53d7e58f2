"""What travels, method by method.

`common.py` has the payloads that all methods share. A method that adds its own has a file of its name. Read this folder
to learn what can leave an institution.
"""
