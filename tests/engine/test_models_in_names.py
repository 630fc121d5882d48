"""Which model a block's name tells, in the names that connectors make."""

import pytest

from kvfs.pool.figures.held_by_model import model_of

HASH = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama-Llama@8@0@1234abcd@bfloat16.pt", "meta-llama-Llama"),
        (f"meta-llama-Llama@0@1@{HASH}.data", "meta-llama-Llama"),
        (f"{HASH}_meta-llama-Llama_3_8.bin", "meta-llama-Llama"),
        (f"{HASH}_deepseek-ai-DeepSeek-V3.bin", "deepseek-ai-DeepSeek-V3"),
        (f"{HASH}_a_model_of_mine_0_1.bin", "a_model_of_mine"),
        (f"{HASH}_a_model_of_mine.bin", "a_model_of_mine"),
        (f"{HASH}.bin", ""),
        (f"{HASH}_0_1.data", ""),
        (HASH, ""),
        ("block", ""),
        ("", ""),
    ],
)
def test_the_model_that_a_name_tells(name: str, model: str) -> None:
    assert model_of(name.encode()).decode() == model
