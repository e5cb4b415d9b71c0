"""Programs of other data have other digests, of what they train on and of what is held out."""

from __future__ import annotations

import numpy as np

from zmqtrain.programs.datasets import digest
from zmqtrain.programs.image import ImageProgram
from zmqtrain.train.program import data_of
from zmqtrain.train.program_wrappers import corrupted


def test_equal_arrays_have_equal_digests_and_other_values_shapes_or_types_others():
    values = np.arange(12, dtype=np.int32)
    others = (values + 1, values.reshape(3, 4), values.astype(np.int64), values[:0])
    assert digest(values) == digest(values.copy()) and len(digest(values)) == 16
    assert len({digest(values), *map(digest, others)}) == 5


def test_shuffled_labels_are_other_training_data():
    program = ImageProgram(width=2)
    training, held_out = data_of(program).split("/")
    assert data_of(ImageProgram(width=4)) == f"{training}/{held_out}" and training != held_out
    spoilt = data_of(corrupted(program, "labels"))
    assert spoilt != data_of(program) and spoilt.endswith(f"/{held_out}")
    assert data_of(object()) == ""
