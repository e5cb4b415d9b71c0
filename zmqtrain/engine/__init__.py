"""Run operations as soon as what they read and change allows: the graph (pure), the threads, the trace (pure).

Nothing is imported here: the graph is used where no thread is wanted.
"""
