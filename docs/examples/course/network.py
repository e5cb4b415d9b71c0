"""A network of sigmoid layers, written out in numpy.

Each layer computes  a = sigmoid(a_before @ weights + biases).  The cost is the cross-entropy of the outputs, so that
the error of the last layer is simply  output - wanted  (Nielsen, Neural Networks and Deep Learning, chapter 3).
"""

from itertools import pairwise

import numpy as np


def sigmoid(z):
    """Return 1 / (1 + exp(-z)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * z))


class Network:
    """Layers of the given sizes, for example (784, 30, 10); the same seed gives the same parameters everywhere.

    parameters: the arrays by name: "weights 0" float32[784, 30], "biases 0" float32[30], "weights 1", ...
    """

    def __init__(self, sizes, seed=0):
        generator = np.random.default_rng(seed)
        self.layers = len(sizes) - 1
        self.parameters = {}
        for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
            weights = generator.normal(0, inputs**-0.5, (inputs, outputs))
            self.parameters[f"weights {layer}"] = weights.astype(np.float32)
            self.parameters[f"biases {layer}"] = np.zeros(outputs, np.float32)

    def forward(self, images):
        """Return what each layer gives, the images first."""
        activations = [images]
        for layer in range(self.layers):
            z = activations[-1] @ self.parameters[f"weights {layer}"] + self.parameters[f"biases {layer}"]
            activations.append(sigmoid(z))
        return activations

    def backward(self, images, wanted, batch):
        """Give (name, gradient) of each array, the last layer first: who wants to may send one while the next comes.

        batch: the gradients are of the cost divided by so many images, of which these may be a part.
        """
        activations = self.forward(images)
        error = (activations[-1] - wanted) / np.float32(batch)
        for layer in reversed(range(self.layers)):
            before = activations[layer]
            earlier = (error @ self.parameters[f"weights {layer}"].T) * before * (1 - before) if layer else None
            yield f"weights {layer}", before.T @ error
            yield f"biases {layer}", error.sum(axis=0)
            error = earlier

    def accuracy(self, images, labels):
        """Return the share of the images, from 0 to 1, whose label gets the largest output."""
        return float((self.forward(images)[-1].argmax(axis=1) == labels).mean())
