"""Named in annotations only."""


class FusibleOperation: ...


class Sequential(FusibleOperation): ...
