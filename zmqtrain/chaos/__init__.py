"""Fault injection: schedules of faults, and the processes and connections into which they are injected."""
