class QuantizedTensor:
    """No tensor of this stand-in is quantized."""
