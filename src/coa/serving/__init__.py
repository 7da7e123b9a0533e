"""An OpenAI-compatible server: a question comes in as a chat, the chain goes out as it is written.

    bytes -> request.ChatRequest -> session: a place, one `loop.Rollout` -> replies.Piece -> app

Every request is one rollout of the one loop, and all of them share one engine and its batch.
`docs/serving.md` has what clients see.
"""

from __future__ import annotations
