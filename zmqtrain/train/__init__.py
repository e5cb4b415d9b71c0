"""The JAX side: a user's Program, the jitted step, and the loop that exchanges every k steps. It knows no network."""
