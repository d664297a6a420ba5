import subprocess
import sys

from engines.base import EngineConfig
from engines.mock.engine import MockConfig
from engines.registry import EngineSpec, create_engine
from shared.protocol import ChatMessage, TextPart
from tests.factories_engine import make_request, run_all


def test_the_mock_engine_is_made_as_specified():
    spec = EngineSpec(
        kind="mock",
        config=EngineConfig(max_model_len=100),
        mock=MockConfig(tokens_per_image=7, num_output_tokens=3),
    )
    loaded = create_engine(spec)
    assert loaded.card.name == "mock"
    assert (loaded.card.max_model_len, loaded.card.image_tokens) == (100, 7)
    prompt = loaded.processor.build_prompt([ChatMessage("user", (TextPart("hi"),))], [])
    answer = run_all(loaded.engine, make_request(prompt=prompt.token_ids))["r0"]
    assert len(answer.token_ids) == 3


def test_the_served_name_is_the_name_on_the_card():
    assert create_engine(EngineSpec(kind="mock", served_name="llava")).card.name == "llava"


def test_the_mock_engine_needs_no_torch():
    program = (
        "import sys; from engines.registry import EngineSpec, create_engine;"
        "create_engine(EngineSpec(kind='mock')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
