"""Stands where TransformerEngine would, so that megatron's own TransformerEngine specs can be built on a CPU.

Holds what megatron-core 0.16.1 imports, with TransformerEngine 2.6's constructor arguments, parameter names and shapes;
nothing computes. Only for processes that ask for parameter names.
"""

from transformer_engine import common, pytorch

__version__ = "2.6.0"
__all__ = ["common", "pytorch"]
