"""An instance as its contract in shared/messages.py has it, without a bus."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import ErrorCode, ErrorInfo, GenerationRequest


@dataclass
class Instance:
    name: str
    incarnation: str
    is_reachable: bool = True
    sequence: int = 0
    held: dict[str, GenerationRequest] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        known = self.held.get(request.request_id)
        if known is not None and known.epoch > request.epoch:
            return ErrorInfo(ErrorCode.CONFLICT, "a newer epoch is held")
        if known is None or known.epoch < request.epoch:
            self.held[request.request_id] = request
            self.running.discard(request.request_id)
            self.admitted.append(request.request_id)
        return None

    def end(self, request_id: str) -> GenerationRequest:
        self.running.discard(request_id)
        self.ended.append(request_id)
        return self.held.pop(request_id)
