"""What travels, method by method: one file for the payloads all share, one for each method that adds its own.

Read this folder to learn what can leave an institution.
"""
