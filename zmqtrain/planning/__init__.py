"""k, d, codec and cut from rates, sizes and measured costs; a link probed before a run."""
