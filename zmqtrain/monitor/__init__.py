"""Record what happens in a run, real or simulated, in one vocabulary."""
