"""When to launch the next step: shortly before the device is done with this one."""

SLACK = 0.002  # seconds from a delayed launch to the end of the step under way


class LaunchTimer:
    """Delays launches during steps of decodes, so that prompts can still come.

    A step that is launched as soon as possible lacks every prompt that comes while the
    one before it is computed. Times are in seconds, of one clock.
    """

    def __init__(self) -> None:
        self.delay = 0.0  # between a step's begin and the launch of the next, if > 0
        self.due = 0.0  # when the next step is to be launched
        # The delay in the step under way; None if that isn't of decodes alone.
        self.current: float | None = None

    def remaining(self, now: float) -> float:
        """Seconds until the next launch is due."""
        return max(0.0, self.due - now)

    def collected(self, now: float, waited: float, late: bool, decodes: bool) -> None:
        """A step's results came at ``now``, and the next step is under way.

        The host ``waited`` for them after its delayed launch; it was ``late`` if the
        device had been idle before. ``decodes``: the next step is of decodes alone.
        """
        if decodes and self.current is not None:
            if late:
                self.delay /= 2
            else:  # up slowly: the host may have waited for Python's lock, too
                self.delay += (self.current + waited - SLACK - self.delay) / 8
        self.current = max(0.0, self.delay) if decodes else None
        self.due = now + (self.current or 0.0)
