"""The text of a stream of segments is that of the whole answer, in whichever order their tokens arrive."""

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.transcriptions import TranscriptAnswer, TranscriptOptions
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Totals
from shared.protocol import Finished, FinishReason, Tokens, Usage

PIECES = st.lists(st.sampled_from(["a", " b", "c ", " ", "\n", ""]), max_size=4)


def events_of(index: int, pieces: list[str]) -> list[ChoiceEvent]:
    name = (f"r-{index}", 1)
    tokens = [Tokens(*name, place, (place,), text) for place, text in enumerate(pieces)]
    end = Finished(*name, FinishReason.STOP, Usage(1, len(pieces)))
    return [(index, event) for event in (*tokens, end)]


@given(segments=st.lists(PIECES, min_size=1, max_size=4), data=st.data())
def test_deltas_join_to_the_whole_text(segments: list[list[str]], data: st.DataObject):
    left = [events_of(index, pieces) for index, pieces in enumerate(segments)]
    order = data.draw(st.permutations([i for i, events in enumerate(left) for _ in events]))
    events = [left[index].pop(0) for index in order]
    options = TranscriptOptions("json", segment_ends=tuple(map(float, range(1, len(segments) + 1))))
    cut = data.draw(st.integers(0, len(events)))
    streamed = TranscriptAnswer(options)
    frames = [*streamed.frames(events[:cut], None), *streamed.frames(events[cut:], Totals())]
    *deltas, done = [json.loads(frame.removeprefix(b"data: ")) for _, frame in frames]
    text = json.loads(TranscriptAnswer(options).whole(events, Totals()))["text"]
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == text
    words = [word for pieces in segments for word in "".join(pieces).split()]
    assert text.split() == words
