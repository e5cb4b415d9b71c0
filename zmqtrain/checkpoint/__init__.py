"""Checkpoints: files that are whole or absent, a folder of the newest, a journal, and a thread that writes them.

A broker and a node keep their state here; what is in it is theirs.
"""
