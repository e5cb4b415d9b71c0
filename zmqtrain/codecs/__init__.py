"""How an array shrinks: codecs of pure functions, the payloads they fill, and the fragments a model is cut into.

docs/codecs.md says what each is, when to take it, and how specs are written.
"""

from zmqtrain.codecs.base import Coding, by_size, codec_from_spec, coding_from_spec, per_leaf
from zmqtrain.codecs.chain import chain
from zmqtrain.codecs.codec import Codec, Stage
from zmqtrain.codecs.dct import dct
from zmqtrain.codecs.feedback import DensityWarmUp, error_feedback, momentum_correction
from zmqtrain.codecs.levels import int2, sign
from zmqtrain.codecs.lowrank import lowrank
from zmqtrain.codecs.payload import check_payload, decode_payload, encode_payload, initial_states, payload_size
from zmqtrain.codecs.plain import bf16, float32
from zmqtrain.codecs.quantize import int4, int4_stochastic, int8, int8_stochastic
from zmqtrain.codecs.rotate import fragment
from zmqtrain.codecs.sparsify import blocktopk, randomk
from zmqtrain.codecs.ternary import ternary
from zmqtrain.codecs.topk import topk

__all__ = [
    "Codec",
    "Stage",
    "Coding",
    "codec_from_spec",
    "coding_from_spec",
    "per_leaf",
    "by_size",
    "chain",
    "fragment",
    "error_feedback",
    "momentum_correction",
    "DensityWarmUp",
    "float32",
    "bf16",
    "int8",
    "int8_stochastic",
    "int4",
    "int4_stochastic",
    "int2",
    "ternary",
    "sign",
    "lowrank",
    "topk",
    "blocktopk",
    "randomk",
    "dct",
    "encode_payload",
    "decode_payload",
    "check_payload",
    "payload_size",
    "initial_states",
]
