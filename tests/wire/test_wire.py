"""The wire: what is decoded is what was encoded, counted bytes are sent bytes, the undeclared stays where it is."""
# ruff: noqa: RUF009 - field declarations, as dataclasses.field

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_replay.config.catalogue import choices
from flwr_replay.config.halves import load_strategy
from flwr_replay.errors import DivergedError, WireError
from flwr_replay.wire.fields import instruction, model, notice, per_sample, statistic
from flwr_replay.wire.payload import REQUESTS, Payload, rows
from flwr_replay.wire.records import Weights, array_record, arrays_in, opened
from flwr_replay.wire.weights import check_weights

DTYPES = ("float32", "float16", "int8", "int64")


@dataclass(frozen=True, kw_only=True)
class Trip(Payload):
    weights: Weights = model()
    num_examples: int = statistic("examples")
    loss: float = statistic("nats")
    counts: list[int] = statistic("examples")
    losses: list[float] = statistic("nats")
    go_on: bool = instruction()
    names: list[str] = instruction()
    flags: list[bool] = instruction()
    text: str = instruction(default="")


@dataclass(frozen=True, kw_only=True)
class Sampled(Payload):
    codes: Any = per_sample("N ...", *DTYPES, means="codes")
    labels: Any = per_sample("N", "int64", means="labels")
    scales: Any = per_sample("N", "float32", means="scales", default=None)
    num_examples: int = statistic("examples")
    name: str = notice()


@dataclass(frozen=True, kw_only=True)
class Careless(Payload):
    num_examples: int = statistic("examples")
    patients: int = 0


@dataclass(frozen=True, kw_only=True)
class Seeded(Payload):
    seed: int = instruction()


for method in choices("strategy"):
    load_strategy(method)  # which declares its requests
any_array = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0, max_side=4))
)
whole, real = st.integers(0, 10**15), st.floats(-1e100, 1e100)
word = st.text(min_size=1, max_size=8)


def lists_of(items):
    return st.lists(items, min_size=1, max_size=4)


trips = st.builds(
    Trip,
    weights=st.dictionaries(word, any_array, max_size=4),
    num_examples=whole,
    loss=real,
    counts=lists_of(whole),
    losses=lists_of(real),
    go_on=st.booleans(),
    names=lists_of(st.text(max_size=5)),
    flags=lists_of(st.booleans()),
    text=st.text(max_size=8),
)


@st.composite
def sampled(draw):
    n = draw(st.integers(0, 4))
    shape = (n, *draw(array_shapes(min_dims=0, max_dims=3, max_side=3)))
    return Sampled(
        codes=draw(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, shape))),
        labels=draw(arrays("int64", n)),
        scales=draw(st.none() | arrays("float32", n)),
        num_examples=draw(whole),
        name=draw(word),
    )


def bits_of(value):
    if isinstance(value, dict):
        return {name: bits_of(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return value


def over_network(payload):
    """Return the records as they come out of the network."""
    content = payload.encode()
    return RecordDict(
        {name: type(record).inflate(record.deflate(), dict(children(record))) for name, record in content.items()}
    )


def children(record):
    for object_id, child in (record.children or {}).items():
        yield object_id, Array.inflate(child.deflate(), dict(child.slice_array()))


@settings(max_examples=60)
@given(payload=trips | sampled())
def test_decode_undoes_encode(payload):
    arrived = type(payload).decode(over_network(payload))
    for name in payload.declared():
        assert bits_of(getattr(arrived, name)) == bits_of(getattr(payload, name)), name


@settings(max_examples=60)
@given(payload=trips | sampled())
def test_counted_bytes_are_flowers_bytes(payload):
    content = payload.encode()
    flowers = sum(record.count_bytes() for record in content.values())
    assert sum(row.bytes for row in rows(content, type(payload))) == flowers
    assert sum(row.bytes for row in rows(content, None)) == flowers
    kinds = {row.field: row.kind for row in rows(content, type(payload))}
    declared = {name.replace("_", "-"): field.kind for name, field in payload.declared().items()}
    assert kinds.items() <= declared.items()


@settings(max_examples=100)
@given(array=any_array, order=st.sampled_from(["C", "F", "strided", "reversed", "big-endian"]))
def test_arrays_travel_in_flowers_own_format(array, order):
    if order == "F":
        array = np.asfortranarray(array).reshape(array.shape, order="F")
    elif order == "big-endian":
        array = array.astype(array.dtype.newbyteorder(">"))
    elif array.ndim and order != "C":
        array = np.repeat(array, 2, axis=-1)[..., ::2] if order == "strided" else array[::-1]
    ours = array_record({"w": array})["w"]
    assert bits_of(ours.numpy()) == bits_of(array)
    flowers = Array(array)
    assert bits_of(opened(ArrayRecord({"w": flowers}))["w"]) == bits_of(array)
    assert (ours.shape, ours.stype, len(ours.data)) == (flowers.shape, flowers.stype, len(flowers.data))
    assert np.dtype(ours.dtype) == np.dtype(flowers.dtype)
    if array.flags.c_contiguous:
        assert ours.data == flowers.data
        assert ours.object_id == flowers.object_id


def contents(change):
    content = Sampled(codes=np.zeros((2, 3), "float32"), labels=np.zeros(2, "int64"), num_examples=2, name="a").encode()
    change(content)
    return content


def put_value(record, key, value):
    return lambda content: content[record].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.__setitem__("more", MetricRecord({"n": 1})), "'more'"),
        (lambda content: content.__setitem__("more", ArrayRecord()), "'more'"),
        (put_value("arrays", "images", Array(np.zeros(2))), "'images'"),
        (put_value("metrics", "age", 70), "'age'"),
        (put_value("metrics", "name", 1), "'name' in metrics"),
        (put_value("config", "patient", "x"), "'patient'"),
        (put_value("config", "num-examples", 2), "'num-examples' in config"),
        (put_value("arrays", "codes", Array(np.zeros((2, 3), "float64"))), "float64"),
        (put_value("arrays", "labels", Array(np.zeros(2, "float32"))), "labels is declared int64"),
        (put_value("arrays", "labels", Array(np.zeros((2, 1), "int64"))), "(2, 1)"),
        (lambda content: content["metrics"].pop("num-examples"), "num_examples"),
    ],
)
def test_what_is_not_declared_is_refused_in_one_line(change, says):
    with pytest.raises(WireError) as refused:
        Sampled.decode(contents(change))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes": np.zeros((2, 3))},
        {"labels": np.zeros((2, 1), "int64")},
        {"labels": np.zeros(2, "int32")},
        {"scales": np.zeros(2, "float16")},
    ],
)
def test_what_is_not_as_declared_cannot_be_sent(wrong):
    right = {"codes": np.zeros((2, 3), "int8"), "labels": np.zeros(2, "int64"), "num_examples": 2, "name": "a"}
    Sampled(**right).encode()
    with pytest.raises(WireError, match=next(iter(wrong))):
        Sampled(**{**right, **wrong}).encode()


def test_arrays_of_objects_cannot_be_sent():
    with pytest.raises(WireError, match="object"):
        array_record({"w": np.array([{"patient": 1}, None])})


def test_a_payload_with_an_undeclared_field_is_refused():
    with pytest.raises(WireError, match=r"Careless\.patients must declare"):
        Careless(num_examples=1).encode()
    with pytest.raises(WireError, match=r"Careless\.patients must declare"):
        Careless.decode(RecordDict({"metrics": MetricRecord({"num-examples": 1})}))


def test_weights_and_samples_do_not_share_a_record():
    # the keys of a state dict are free: rows of patients beside it would pass, and be counted, as weights
    @dataclass(frozen=True, kw_only=True)
    class Mixed(Payload):
        weights: Weights = model()
        codes: Any = per_sample("N", means="codes")

    with pytest.raises(WireError, match="Mixed"):
        Mixed(weights={}, codes=np.zeros(2)).encode()


def test_a_record_that_is_handed_on_is_not_opened():
    record = array_record({"w": np.arange(3)})
    assert array_record(record)["w"].data is record["w"].data
    assert opened(record)["w"].tolist() == [0, 1, 2]


def test_later_changes_of_the_senders_arrays_do_not_travel():
    array = np.zeros(3)
    content = RecordDict({"arrays": array_record({"w": array}), "config": ConfigRecord()})
    array += 1
    received = arrays_in(content)["w"]
    assert received.tolist() == [0, 0, 0]
    assert not received.flags.writeable


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num-examples", -1),
        ("num-examples", 2.5),
        ("num-examples", [1, 2]),
        ("loss", float("nan")),
        ("loss", float("inf")),
        ("counts", [1, -1]),
        ("counts", [1.0]),
        ("losses", [0.5, float("nan")]),
    ],
)
def test_numbers_that_cannot_be_are_refused(field, value):
    whole = Trip(
        weights={}, num_examples=3, loss=0.5, counts=[1], losses=[0.5], go_on=True, names=["a"], flags=[True], text="b"
    )
    content = whole.encode()
    assert Trip.decode(content) == whole
    content["metrics"][field] = value
    with pytest.raises(WireError, match=f"Trip.{field.replace('-', '_')} must be"):
        Trip.decode(content)


def test_a_variance_below_zero_says_what_a_server_makes_of_it():
    with pytest.raises(WireError, match=r"'norm\.running_var' is: send .* released it, or its mean, uncorrected"):
        check_weights({"norm.weight": np.float32([-1]), "norm.running_var": np.float32([-1])})


@pytest.mark.parametrize("wrong", [1e20, -1e20, np.inf, -np.inf, np.nan])
def test_weights_of_either_sign_are_bounded(wrong):
    with pytest.raises(DivergedError, match="'weight' is not"):
        check_weights({"weight": np.float32([0, wrong])})


def test_bytes_that_are_no_array_or_more_than_one_are_refused():
    whole = Array(np.ones(3))
    with pytest.raises(WireError, match="its header and numbers only"):
        opened(ArrayRecord({"w": Array(whole.dtype, whole.shape, whole.stype, whole.data + bytes(6000))}))
    for stype, data in (("torch", whole.data), (whole.stype, b"PK" + whole.data), (whole.stype, b"")):
        with pytest.raises(WireError, match="NumPy's file format"):
            opened(ArrayRecord({"w": Array(whole.dtype, whole.shape, stype, data)}))
    for dtype in ("torch.float32", "no dtype"):
        with pytest.raises(WireError, match="NumPy's file format"):
            opened(ArrayRecord({"w": Array(dtype, whole.shape, whole.stype, whole.data)}))
    for dtype, shape in (("float64", (1, 3)), ("int64", (3,))):  # as many bytes, and another header
        with pytest.raises(WireError, match="must be as declared"):
            opened(ArrayRecord({"w": Array(dtype, shape, whole.stype, whole.data)}))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    with pytest.raises(WireError, match="NumPy's file format"):  # pointers of somebody else's memory
        opened(ArrayRecord({"w": Array("object", (1,), whole.stype, header.getvalue() + bytes(8))}))
    turned = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert (opened(ArrayRecord({"w": Array(turned)}))["w"] == turned).all()


@pytest.mark.parametrize("payload", sorted({request.answer for request in REQUESTS.values()}, key=str))
def test_no_answer_has_a_number_that_sums_or_pictures_cannot_take(payload):
    """A loss of 1.7e308 was taken by the wire, and no picture could show it."""
    stated = {name: kind for name, (field, kind) in payload.scalar_types().items() if field.kind == "statistic"}
    for name, kind in stated.items():
        if kind.base not in (int, float):
            continue
        beyond = (1.7e308, -1e101, float("inf"), float("nan")) if kind.base is float else (10**15 + 1, -1)
        for value in beyond:
            content = RecordDict({"metrics": MetricRecord({name.replace("_", "-"): [value] if kind.listed else value})})
            with pytest.raises(WireError, match=name):
                payload.check_scalars(content)


def test_an_instruction_may_be_a_seed():
    Seeded.check_scalars(RecordDict({"config": ConfigRecord({"seed": 2**62})}))
