"""The layouts of the gate on disk: packing, unpacking, and whole checkpoints written in the authors' form."""

import itertools
import json

import pytest
import torch
from support import RELEASED, RELEASED_NAMES, randomise, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.conversion import pack_released, released_config, released_state_dict, unpack_released

# heads, key/value heads, head_dim: groups of 1 (MHA) to all heads (MQA), odd counts too
SHAPES = [
    (1, 1, 2), (2, 1, 4), (4, 1, 6), (7, 1, 2), (4, 4, 6), (5, 5, 2), (6, 3, 10), (6, 2, 4), (9, 3, 8), (15, 5, 4),
]  # fmt: skip
shapes = pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])
kinds = pytest.mark.parametrize("trailing", [(3,), ()], ids=["weight", "bias"])


def gate_config(gate, heads, kv_heads, dim) -> GatedQwenConfig:
    return tiny_config(attn_gate=gate, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim)


def numbered_rows(count, first, trailing) -> torch.Tensor:
    """`count` rows, each filled with its own number."""
    return torch.arange(first, first + count).view(-1, *[1] * len(trailing)).expand(count, *trailing).clone()


def native_rows(gate, heads, dim, trailing) -> tuple[torch.Tensor, torch.Tensor]:
    """A q_proj and a g_proj in which no two rows are alike."""
    query = numbered_rows(heads * dim, 0, trailing)
    return query, numbered_rows(heads * (1 if gate == "headwise" else dim), 1000, trailing)


def packed_by_hand(query, gate_rows, gate, heads, kv_heads, dim) -> torch.Tensor:
    """As the authors describe it: key/value group by group, the query rows of its heads, then their gate rows."""
    packed = []
    for group in range(kv_heads):
        members = [head for head in range(heads) if head // (heads // kv_heads) == group]
        for head in members:
            for channel in range(dim):
                packed.append(query[head * dim + channel])
        for head in members:
            if gate == "headwise":
                packed.append(gate_rows[head])
            else:
                for channel in range(dim):
                    packed.append(gate_rows[head * dim + channel])
    return torch.stack(packed)


@gated
@shapes
@kinds
def test_each_row_is_where_the_authors_put_it(gate, heads, kv_heads, dim, trailing):
    config = gate_config(gate, heads, kv_heads, dim)
    query, gate_rows = native_rows(gate, heads, dim, trailing)
    packed = packed_by_hand(query, gate_rows, gate, heads, kv_heads, dim)
    assert torch.equal(pack_released(query, gate_rows, config), packed)
    unpacked = unpack_released(packed, config)
    assert torch.equal(unpacked[0], query) and torch.equal(unpacked[1], gate_rows)


@gated
@shapes
@kinds
def test_packing_an_unpacked_tensor_gives_it_back(gate, heads, kv_heads, dim, trailing):
    config = gate_config(gate, heads, kv_heads, dim)
    rows = heads * dim + heads * (1 if gate == "headwise" else dim)
    packed = torch.randn(rows, *trailing, generator=torch.Generator().manual_seed(0)).bfloat16()
    query, gate_rows = unpack_released(packed, config)
    assert query.shape == (heads * dim, *trailing) and gate_rows.shape == (rows - heads * dim, *trailing)
    assert query.dtype == gate_rows.dtype == torch.bfloat16
    assert torch.equal(pack_released(query, gate_rows, config), packed)


@gated
def test_the_rows_of_the_published_1_7b_model(gate):
    """The rows that the authors' description names, for their 16 heads of 128 over 8 key/value heads."""
    config = gate_config(gate, 16, 8, 128)
    width = {"headwise": 1, "elementwise": 128}[gate]
    query, gate_rows = unpack_released(torch.arange(16 * 128 + 16 * width), config)
    block = 256 + 2 * width
    for group in range(8):
        assert query[256 * group] == block * group and query[256 * group + 255] == block * group + 255
        own = gate_rows[2 * width * group : 2 * width * (group + 1)]
        assert own.tolist() == list(range(block * group + 256, block * (group + 1)))


@gated
@shapes
def test_parts_of_a_packed_tensor_unpack_to_parts_of_its_rows(gate, heads, kv_heads, dim):
    config = gate_config(gate, heads, kv_heads, dim)
    query, gate_rows = native_rows(gate, heads, dim, (3,))
    packed = pack_released(query, gate_rows, config)
    for shards in (count for count in range(2, kv_heads + 1) if kv_heads % count == 0):
        parts = [unpack_released(part, config, shards) for part in packed.chunk(shards)]
        assert torch.equal(torch.cat([part[0] for part in parts]), query)
        assert torch.equal(torch.cat([part[1] for part in parts]), gate_rows)


@gated
@pytest.mark.parametrize("change", [-1, 1])
@kinds
def test_another_number_of_rows_is_refused(gate, change, trailing):
    expected = {"headwise": 66, "elementwise": 120}[gate]
    with pytest.raises(ValueError, match=f"has {expected} rows here, got {expected + change}$"):
        unpack_released(torch.zeros(expected + change, *trailing), gate_config(gate, 6, 3, 10))


@gated
def test_parts_that_cut_a_group_are_refused(gate):
    config = gate_config(gate, 6, 3, 10)
    rows = {"headwise": 66, "elementwise": 120}[gate]
    with pytest.raises(ValueError, match="rows here"):
        unpack_released(torch.zeros(rows // 2, 3), config, shards=2)


def head_major(packed, heads, dim) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3-Next's reading of the same shape: head by head, its query rows, then its gate rows."""
    blocks = packed.chunk(heads)
    return torch.cat([block[:dim] for block in blocks]), torch.cat([block[dim:] for block in blocks])


@shapes
def test_head_major_reading_differs_where_a_group_has_several_heads(heads, kv_heads, dim):
    config = gate_config("elementwise", heads, kv_heads, dim)
    packed = torch.randn(2 * heads * dim, 3, generator=torch.Generator().manual_seed(0))
    released, other = unpack_released(packed, config), head_major(packed, heads, dim)
    for ours, theirs in zip(released, other, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs) == (heads == kv_heads)


@torch.no_grad()
def test_the_two_readings_of_one_checkpoint_give_different_logits():
    config = tiny_config(attn_gate="elementwise")
    model, twin = randomise(GatedQwenForCausalLM(config)), randomise(GatedQwenForCausalLM(config))
    for layer in twin.model.layers:
        attention = layer.self_attn
        packed = pack_released(attention.q_proj.weight, attention.g_proj.weight, config)
        query, gate_rows = head_major(packed, 6, 10)
        attention.q_proj.weight.copy_(query)
        attention.g_proj.weight.copy_(gate_rows)
    ids = torch.arange(3, 20)[None]
    assert (model(ids).logits - twin(ids).logits).abs().max() > 1


# Whole checkpoints


def write_released(model, folder):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(released_config(model.config)))
    torch.save(released_state_dict(model.state_dict(), model.config), folder / "pytorch_model.bin")


@pytest.mark.parametrize("biases", [False, True], ids=["no-bias", "biases"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (9, 3), (4, 1), (3, 3)])
def test_a_checkpoint_written_in_the_released_form_loads_the_same(gate, biases, tied, heads, kv_heads, tmp_path):
    config = tiny_config(
        attn_gate=gate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attention_bias=biases,
        attn_gate_bias=biases and gate is not None,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        pad_token_id=None,
        dtype=torch.float32,
    )
    model = randomise(GatedQwenForCausalLM(config))
    write_released(model, tmp_path)

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is GatedQwenForCausalLM and not any(info.values()), info
    native = model.state_dict()
    assert loaded.state_dict().keys() == native.keys()
    assert all(torch.equal(value, native[name]) for name, value in loaded.state_dict().items())
    assert loaded.config.to_diff_dict() == {**config.to_diff_dict(), "architectures": ["GatedQwenForCausalLM"]}


def test_the_released_form_of_a_released_checkpoint_is_the_one_it_came_from():
    for name in RELEASED_NAMES:
        model = AutoModelForCausalLM.from_pretrained(RELEASED / name)
        theirs = torch.load(RELEASED / name / "pytorch_model.bin", weights_only=True)
        ours = released_state_dict(model.state_dict(), model.config)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]) for key in theirs)
        fields = json.loads((RELEASED / name / "config.json").read_text())
        written = released_config(model.config)
        assert {name: fields.get(name) for name in written} == written


def test_released_state_dict_leaves_its_argument_alone(gate):
    model = GatedQwenForCausalLM(tiny_config(attn_gate=gate, tie_word_embeddings=True))
    state_dict = model.state_dict()
    before = dict(state_dict)
    released = released_state_dict(state_dict, model.config)
    assert state_dict.keys() == before.keys() and all(state_dict[name] is before[name] for name in before)
    assert not any("g_proj" in name for name in released)
    assert released["lm_head.weight"].data_ptr() == released["model.embed_tokens.weight"].data_ptr()


INEXPRESSIBLE = [
    ({"attn_gate_scale": 2.0}, "attn_gate_scale"),
    ({"attn_gate_layers": [0, 2]}, "attn_gate_layers"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"attention_bias": True, "attention_output_bias": False, "attn_gate_bias": True}, "attention_output_bias"),
    ({"attention_output_bias": True}, "attention_output_bias"),
    ({"attention_bias": True}, "attn_gate_bias"),
    ({"attn_gate_bias": True}, "attn_gate_bias"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "sliding_window"),
]


@pytest.mark.parametrize(("fields", "reason"), INEXPRESSIBLE, ids=lambda value: "-".join(value))
def test_what_the_authors_code_cannot_express_is_refused(fields, reason):
    with pytest.raises(ValueError, match=rf"^the released form has no .*\b{reason}\b"):
        released_config(tiny_config(**fields))


def test_every_reason_is_named_at_once():
    with pytest.raises(ValueError) as refusal:
        released_config(tiny_config(attn_gate_scale=2.0, mlp_bias=True))
    assert str(refusal.value) == "the released form has no attn_gate_scale, mlp_bias"


def read_back(config) -> GatedQwenConfig:
    return GatedQwenConfig.from_dict(json.loads(json.dumps(released_config(config))))


def test_what_the_authors_code_can_express_is_read_back(gate):
    for biases, qk_norm in itertools.product([True, False], repeat=2):
        config = tiny_config(
            attn_gate=gate,
            attention_bias=biases,
            attn_gate_bias=biases and gate is not None,
            use_qk_norm=qk_norm,
            architectures=["GatedQwenForCausalLM"],
            pad_token_id=None,
            dtype=torch.bfloat16,
        )
        assert read_back(config).to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_read_back(dtype):
    assert read_back(tiny_config(dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("ids", [(1, 2, 0), (None, [2, 5], None), (7, 7, 7)])
def test_token_ids_are_read_back(ids):
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    config = tiny_config(**dict(zip(names, ids, strict=True)), dtype=torch.float32)
    assert tuple(getattr(read_back(config), name) for name in names) == ids


def test_the_released_form_is_recognised_by_the_auto_class(gate, tmp_path):
    fields = released_config(tiny_config(attn_gate=gate, dtype=torch.float32))
    assert fields["model_type"] == "qwen2"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is GatedQwenConfig and config.attn_gate == gate
