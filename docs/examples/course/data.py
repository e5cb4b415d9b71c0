"""The images that the network learns from, and the order in which it sees them."""

import numpy as np

from zmqtrain.programs.datasets import load_digits, load_image_folder

TRAINED_ON, TESTED_ON = 9_000, 1_000
"""At most so many images: the first of the training images, the last of those held out."""


def load(folder, centred=True):
    """Return training images float32[n, pixels], labels one-hot float32[n, classes], test images float32[m, pixels]
    and their labels int32[m].

    folder: of IDX files, as MNIST is published; "" takes the 1,797 digits of 8x8 pixels that come with scikit-learn.
    centred: take the mean training image away from each, so that pixels are as often negative as positive.
    """
    images = load_image_folder(folder) if folder else load_digits()
    training = images.training_images[:TRAINED_ON].reshape(-1, images.training_images[0].size) / np.float32(255)
    test = images.held_out_images[-TESTED_ON:].reshape(-1, training.shape[1]) / np.float32(255)
    if centred:
        mean = training.mean(axis=0)
        training, test = training - mean, test - mean
    wanted = np.eye(images.classes, dtype=np.float32)[images.training_labels[:TRAINED_ON]]
    return training, wanted, test, images.held_out_labels[-TESTED_ON:]


def shuffled_batches(count, batch, epochs, seed):
    """Give index arrays: in each epoch all `count` samples in another order, in batches; the same on every process."""
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        order = generator.permutation(count)
        for start in range(0, count - batch + 1, batch):
            yield order[start : start + batch]
