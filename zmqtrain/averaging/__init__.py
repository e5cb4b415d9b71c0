"""The one equation's two sides, a node's and the hub's, as functions of arrays, and the memory they work in."""
