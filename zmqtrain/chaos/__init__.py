"""What befalls a run on purpose, and how it is played: schedules of faults, the processes and wires they befall."""
