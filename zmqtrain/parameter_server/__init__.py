"""Keys, their values, and the gradients that workers push for them: the pure room of the parameter server."""
