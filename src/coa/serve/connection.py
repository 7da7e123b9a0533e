"""One connection, on which a client's leaving is noticed whatever it sent before.

uvicorn keeps what comes after a request for later, and reads no further until it has answered: the
end of a connection on which one byte too many was sent would not be seen during a rollout.
"""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Drops what a client sends while its request is answered, and closes after the answer.

    A client that pipelines sends again what got no answer; h11 also bounds the headers of a
    request, which uvicorn's other protocols do not.
    """

    def data_received(self, received: bytes) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            super().data_received(received)
        else:
            # What follows could be the rest of what was dropped, so nothing more is read as HTTP.
            cycle.keep_alive = False
