"""Before any training, words mean what the eye says, and heads look up, fetch and compare."""

import numpy as np
import pytest
import torch
from torch import Tensor

from training.shapes.architecture import NUM_IMAGE_TOKENS, make_model
from training.shapes.code_book import CodeBook
from training.shapes.export import make_tokenizer
from training.shapes.gallery import encode
from training.shapes.head_start import give_head_start
from training.shapes.scene_targets import SceneTargets
from training.shapes.tokenizer import IMAGE_ID
from training.shapes.world import Scene, make_scene

BOOK = CodeBook.of_width(256)
PAIR = (("red", "star", "top left"), ("blue", "ring", "center"))
SCENE = make_scene("white", *PAIR, ("red", "cross", "bottom right", "small"))
VARIED = make_scene("white", *PAIR, ("red", "circle", "bottom right", "small"))


def targets_of(scene: Scene) -> SceneTargets:
    image = torch.zeros(1, 96, 96, 3, dtype=torch.uint8)
    codes = torch.from_numpy(np.stack([encode(scene)]))
    return SceneTargets.of(image, codes, round(NUM_IMAGE_TOKENS**0.5))


class Reader:
    """A fresh decoder with its head start, to which images are given as a perfect eye would."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer(num_conversations=500)
        self.model = make_model()
        give_head_start(self.model, self.tokenizer, BOOK)

    @torch.no_grad()
    def states(self, text: str, *scenes: Scene) -> tuple[list[str], list[Tensor]]:
        """Tokens, and their states before each layer and at the end. Shapes: (T, width) each."""
        ids = [
            id
            for once in self.tokenizer.encode(text)
            for id in (NUM_IMAGE_TOKENS if once == IMAGE_ID else 1) * [once]
        ]
        decoder = self.model.model.language_model
        embeddings = decoder.embed_tokens(torch.tensor([ids]))
        features = torch.cat([BOOK.write(targets_of(scene))[0] for scene in scenes])
        is_image = (torch.tensor([ids]) == IMAGE_ID).unsqueeze(-1)
        result = decoder(
            inputs_embeds=embeddings.masked_scatter(is_image, features),
            use_cache=False,
            output_hidden_states=True,
        )
        words = [str(self.tokenizer.decode([id])).strip() for id in ids]
        return words, [state[0] for state in result.hidden_states]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


def strongest(state: Tensor, name: str) -> str:
    return BOOK.CLASSES[name][int((BOOK.vectors[name] @ state).argmax())]


def test_what_is_written_can_be_read():
    targets = targets_of(SCENE)
    features = BOOK.write(targets)
    assert set(BOOK.accuracy(features, targets).values()) == {1.0}
    assert BOOK.loss(features, targets) < BOOK.loss(0.5 * features, targets)


def test_a_word_finds_what_it_names(reader: Reader):
    words, states = reader.states("USER: <image>\nWhat color is the ring? ASSISTANT: ", SCENE)
    ring = states[2][words.index("ring")]
    assert strongest(ring, "color") == "blue"
    assert strongest(ring, "column") == "center"


@pytest.mark.parametrize(
    ("place", "color", "kind"), [("top left", "red", "star"), ("bottom right", "red", "cross")]
)
def test_two_words_name_one_place(reader: Reader, place: str, color: str, kind: str):
    words, states = reader.states(f"USER: <image>\nWhat is at the {place}? ASSISTANT: ", SCENE)
    last = words.index(place.split()[1])
    assert strongest(states[1][last], "row") == place.split()[0]
    assert strongest(states[2][last], "color") == color
    assert strongest(states[2][last], "kind") == kind


def test_later_images_are_marked(reader: Reader):
    words, states = reader.states("USER: <image>\n<image>\nCompare.", SCENE, VARIED)
    marks = states[1] @ BOOK.second
    patches = [index for index, word in enumerate(words) if word == "<image>"]
    first, second = patches[:NUM_IMAGE_TOKENS], patches[NUM_IMAGE_TOKENS:]
    assert marks[first].max() < 0.5 < 0.8 < marks[second].min()


def test_a_difference_is_found_where_it_is(reader: Reader):
    text = "USER: <image>\n<image>\nAre the images the same? ASSISTANT: "
    words, states = reader.states(text, SCENE, VARIED)
    patches = [index for index, word in enumerate(words) if word == "<image>"]
    second = (states[3] @ BOOK.differs)[patches[NUM_IMAGE_TOKENS:]].view(6, 6)
    elsewhere = second.clone()
    elsewhere[4:, 4:] = 0
    assert second[4:, 4:].min() > 1.5 * elsewhere.max()
