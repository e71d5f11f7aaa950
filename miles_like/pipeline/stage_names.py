"""Names of the stages, which the command line has without their code."""

STAGES = ("fetch", "dequantize", "convert", "stage", "train")
