"""R3: what is refused before a byte of a table is read, and values of rows (9.2)."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dsv41chat.engine.engram.reader import EngramReader
from dsv41chat.engine.engram.table import EngramSettings, TableRef, find_table, row_format
from dsv41chat.engine.engram.values import decode_rows, fp8_value_bits, take_values
from dsv41chat.engine.errors import EngramReadError, PackDamaged, PackError, PackIncomplete, PackUnsupported
from tests.engine.engram.tables import FORMATS, oracle, write_table


@pytest.mark.parametrize("label", FORMATS)
def test_formats_are_read_off_the_shapes(tmp_path, label):
    assert row_format(write_table(tmp_path / "t", 10, label)).label == label


def changed(spec, part, **fields):
    return replace(spec, **{part: replace(getattr(spec, part), **fields)})


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda s: replace(s, rows=11), PackDamaged),
        (lambda s: replace(s, dim=128), PackDamaged),
        (lambda s: changed(s, "weight", dtype="F8_E5M2"), PackUnsupported),
        (lambda s: changed(s, "weight", dtype="I8"), PackUnsupported),
        (lambda s: changed(s, "scale", dtype="U8"), PackUnsupported),
        (lambda s: changed(s, "scale", shape=(10, 4)), PackDamaged),
        (lambda s: changed(s, "scale", shape=(10,)), PackDamaged),
        (lambda s: changed(s, "weight", offset=4), PackDamaged),
        (lambda s: changed(s, "weight", offset=s.weight.offset + 1), PackDamaged),
    ],
)
def test_release_tables_that_contradict_their_config(tmp_path, damage, error):
    with pytest.raises(error, match="layers.1.engram"):
        EngramReader.open([damage(write_table(tmp_path / "t", 10))])


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda s: changed(s, "bias", shape=(10, 8)), PackDamaged),
        (lambda s: changed(s, "bias", dtype="F16"), PackDamaged),
        (lambda s: changed(s, "weight", shape=(10, 24)), PackUnsupported),  # three bits
        (lambda s: changed(s, "weight", shape=(10, 31)), PackDamaged),
        (lambda s: replace(changed(s, "scale", shape=(10, 2)), bias=replace(s.bias, shape=(10, 2))), PackUnsupported),  # groups of 128
    ],
)
def test_affine_tables_that_contradict_their_config(tmp_path, damage, error):
    with pytest.raises(error, match="layers.1.engram"):
        EngramReader.open([damage(write_table(tmp_path / "t", 10, "affine4-g64"))])


def test_a_missing_or_short_file(tmp_path):
    spec = write_table(tmp_path / "t", 10)
    with open(tmp_path / "t", "r+b") as file:
        file.truncate(spec.weight.end - 1)
    with pytest.raises(PackDamaged, match="download"):
        EngramReader.open([spec])
    (tmp_path / "t").unlink()
    with pytest.raises(PackIncomplete):
        EngramReader.open([spec])


@pytest.mark.parametrize("prefix", ("", "model.", "language_model.", "language_model.model."))
@pytest.mark.parametrize("leaves", (("weight", "scale"), ("weight", "scales", "biases")))
def test_tables_are_found_under_every_spelling(prefix, leaves, tmp_path):
    refs = {f"{prefix}layers.14.engram.embed.{leaf}": TableRef(tmp_path, 8, "U8", (1, i)) for i, leaf in enumerate(leaves)}
    spec = find_table(refs, 14, 256, 1)
    assert spec.name == "layers.14.engram" and [ref.shape[1] for ref in spec.regions] == list(range(len(leaves)))
    for missing in refs:
        with pytest.raises(PackIncomplete):
            find_table({key: ref for key, ref in refs.items() if key != missing}, 14, 256, 1)
    with pytest.raises(PackError):
        find_table(refs | {"other." + key: ref for key, ref in refs.items()}, 1, 256, 1)
    twice = {"" if prefix else "model.": refs}
    doubled = refs | {next(iter(twice)) + key.removeprefix(prefix): ref for key, ref in refs.items()}
    with pytest.raises(PackDamaged, match="twice"):
        find_table(doubled, 14, 256, 1)


@pytest.mark.parametrize("field", ("mode", "scales", "access", "path", "cache_budget", "row_cache"))
def test_settings_are_checked(field):
    with pytest.raises(ValueError, match=f"engram.{field}"):
        EngramSettings(**{field: -3 if field in ("cache_budget", "row_cache") else "turbo"})


# values


def e4m3(byte):
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if sign else value


def test_every_code_and_every_scale():
    values = np.array(mx.array(fp8_value_bits()).view(mx.bfloat16).astype(mx.float32)).reshape(256, 256)
    for scale in range(256):
        for code in range(256):
            got = values[scale, code]
            if scale == 255 or (code & 0x7F) == 0x7F:
                assert np.isnan(got)
                continue
            want = e4m3(code) * 2.0 ** (scale - 127)
            if abs(want) >= 2.0**-126:
                assert got == (want if abs(want) < 2.0**128 else np.copysign(np.inf, want))
            else:  # a bfloat16 subnormal: a multiple of 2^-133, nearest, ties to even
                assert got == np.round(want * 2.0**133) * 2.0**-133
            assert np.signbit(got) == bool(code & 0x80)


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("dim", (64, 256))
def test_gather_then_decode_equals_decode_then_gather(tmp_path, label, dim):
    spec = write_table(tmp_path / "t", 500, label, dim)
    reader = EngramReader.open([spec])
    whole = decode_rows(reader.gather(0, np.arange(500)[:, None]))
    assert whole.dtype == mx.bfloat16 and whole.shape == (500, dim)
    if label != "fp8":
        weight, scale, bias = (mx.array(part) for part in oracle(spec, np.arange(500)))
        fmt = row_format(spec)
        want = mx.dequantize(weight.view(mx.uint32), scale.view(mx.bfloat16), bias.view(mx.bfloat16), group_size=fmt.group, bits=fmt.bits)
        assert mx.array_equal(whole.view(mx.uint16), want.view(mx.uint16))
    for shape in ((0, 24), (1, 24), (2, 4), (50, 24)):
        ids = np.random.default_rng(2).integers(0, 500, shape)
        ticket = reader.stage([ids])
        values = take_values(ticket, 0)
        assert values.shape == (shape[0], shape[1] * dim)
        assert mx.array_equal(values.view(mx.uint16), whole[mx.array(ids.reshape(-1))].reshape(*values.shape).view(mx.uint16))
    assert reader.staging.in_flight == 0
    reader.close()


@pytest.mark.parametrize("label, region, value", [("fp8", "weight", b"\xff"), ("fp8", "scale", b"\xff"), ("affine4-g64", "bias", b"\xc0\x7f")])
def test_a_row_that_is_not_a_number_is_an_error(tmp_path, label, region, value):
    spec = write_table(tmp_path / "t", 100, label)
    ref = getattr(spec, region)
    with open(spec.weight.file, "r+b") as file:
        file.seek(ref.offset + 7 * ref.row_bytes)
        file.write(value)
    reader = EngramReader.open([spec])
    assert decode_rows(reader.gather(0, np.array([[6, 8]]))).shape == (1, 512)
    with pytest.raises(EngramReadError, match="1 of 2 rows.*not numbers") as caught:
        decode_rows(reader.gather(0, np.array([[7, 8]])))
    assert caught.value.file == spec.weight.file
    reader.close()
