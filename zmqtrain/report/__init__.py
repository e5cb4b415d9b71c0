"""A report of one run, or of several beside each other: one HTML file with pictures and tables."""
