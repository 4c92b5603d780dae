"""A clock that a test winds."""


class HandClock:
    """Seconds that pass when they are told to, and `tick` of them whenever it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now
