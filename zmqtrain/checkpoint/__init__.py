"""What can be started again from: files that are whole or not there, a folder of the newest, a journal, and how often.

A broker and a node keep their state here; what is in it is theirs.
"""
