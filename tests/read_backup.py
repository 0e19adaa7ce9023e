#!/usr/bin/env python3
"""Reads Pointsman's durable state by its documentation alone.

    read_backup.py DOCS BACKUP [QUERY]      decodes a backup; prints its lanes, and scores of the query (a JSON array)
    read_backup.py DOCS --golden FILE...    decodes single records; prints them with the names in the schema
    read_backup.py DOCS --map FILE          reads the ordered map of a store, as JSON with keys and values in base64;
                                            prints the head and the records of every generation

DOCS is docs/formats.md: the blocks marked `schema` are the only source of kinds, versions, fields and types. Anything
that they do not describe is an error: an unknown kind, version or key, a length that lies, bytes that are left over.
Checksums are verified if the module xxhash is there; "checksums" in the output says whether they were.
"""

import base64
import json
import math
import re
import struct
import sys
from collections import Counter

try:
    import xxhash
except ImportError:
    xxhash = None

MAGIC = b"POINTSMN"


class Bad(Exception):
    """The documentation or the data is wrong."""


class Schema:
    """The records, structs and enums of the schema blocks."""

    def __init__(self, markdown):
        self.structs, self.enums = {}, {}
        self.by_kind, self.by_key, self.short = {}, {}, None
        self.seen = set()
        for block in re.findall(r"^```schema\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL):
            self.parse(block)
        if not self.by_kind or self.short is None:
            raise Bad("the documentation has no complete schema")
        for name, members in [*self.structs.items(), *self.enums.items()]:
            for member, of in members:
                if of is not None:
                    self.check(of, f"{name}.{member}")
        for name, _ in [*self.by_kind.values(), self.short]:
            self.check(("named", name), name)

    def parse(self, block):
        members = None
        for line in block.splitlines():
            text = line.split("#")[0].rstrip()
            if not text:
                continue
            if found := re.fullmatch(r"record (\w+)(?: kind (\d+))? version (\d+)(?: key((?: [a-z])+))?", text):
                name, kind, version, keys = found.groups()
                if kind is None:
                    self.short = self.once(self.short is None, (name, int(version)), text)
                else:
                    self.once(int(kind) not in self.by_kind, None, text)
                    self.by_kind[int(kind)] = (name, int(version))
                for key in (keys or "").split():
                    self.once(key not in self.by_key, None, text)
                    self.by_key[key] = name
                members = None
            elif found := re.fullmatch(r"(struct|enum) (\w+)", text):
                of, name = found.groups()
                members = self.once(name not in self.structs and name not in self.enums, [], text)
                (self.structs if of == "struct" else self.enums)[name] = members
                is_enum = of == "enum"
            elif (found := re.fullmatch(r"  (\w+)(?:: (.+))?", text)) and members is not None:
                name, of = found.groups()
                self.once(all(name != known for known, _ in members), None, text)
                if of is None and not is_enum:
                    raise Bad(f"schema: a field without a type: {line}")
                members.append((name, of and parse_type(of)))
            else:
                raise Bad(f"schema: cannot parse: {line}")

    @staticmethod
    def once(is_first, value, text):
        if not is_first:
            raise Bad(f"schema: defined twice: {text}")
        return value

    def check(self, of, where):
        """Every name in a type is defined."""
        if of[0] == "named" and of[1] not in self.structs and of[1] not in self.enums:
            raise Bad(f"schema: {where}: there is no {of[1]}")
        for inner in of[1:]:
            if isinstance(inner, tuple):
                self.check(inner, where)

    def unseen(self):
        """Structs and variants that nothing decoded so far."""
        variants = [f"{name}.{variant}" for name, variants in self.enums.items() for variant, _ in variants]
        return sorted(name for name in [*self.structs, *variants] if name not in self.seen)

    def open(self, data, expected=None):
        """The name and the value of a record in an envelope or behind a version byte."""
        if data[:8] == MAGIC:
            if len(data) < 28:
                raise Bad("the envelope is cut off")
            kind, version, length = struct.unpack_from("<HHQ", data, 8)
            if len(data) != 20 + length + 8:
                raise Bad(f"the envelope has {len(data)} bytes, but a payload of {length}")
            if xxhash and xxhash.xxh3_64_intdigest(data[:-8]) != int.from_bytes(data[-8:], "little"):
                raise Bad("the checksum does not match")
            if kind not in self.by_kind:
                raise Bad(f"unknown kind {kind}")
            (name, newest), payload = self.by_kind[kind], data[20:-8]
        else:
            if not data:
                raise Bad("an empty record")
            (name, newest), version, payload = self.short, data[0], data[1:]
        if version != newest:
            raise Bad(f"{name}: unknown version {version}")
        if expected not in (None, name):
            raise Bad(f"found a {name}, expected a {expected}")
        reader = Reader(self, payload)
        value = reader.read(("named", name))
        if reader.at != len(payload):
            raise Bad(f"{name}: {len(payload) - reader.at} bytes are left over")
        return name, value


def parse_type(text):
    """A type as a tuple: its form, then what it is made of."""
    tokens = re.findall(r"\w+|[\[\]{}():;,?]", text)
    if "".join(tokens) != text.replace(" ", ""):
        raise Bad(f"schema: cannot parse the type {text}")

    def take(expected=None):
        if not tokens or expected not in (None, tokens[0]):
            raise Bad(f"schema: cannot parse the type {text}")
        return tokens.pop(0)

    def one():
        token = take()
        if token == "[":
            inner = one()
            of = ("list", inner)
            if tokens[:1] == [";"]:
                take()
                of = ("array", inner, int(take()))
            take("]")
        elif token == "{":
            key = one()
            take(":")
            of = ("map", key, one())
            take("}")
        elif token == "(":
            parts = [one()]
            while tokens[:1] == [","]:
                take()
                parts.append(one())
            take(")")
            of = ("tuple", *parts)
        elif re.fullmatch(r"\w+", token):
            of = (token,) if token in Reader.PLAIN else ("named", token)
        else:
            raise Bad(f"schema: cannot parse the type {text}")
        if tokens[:1] == ["?"]:
            take()
            of = ("option", of)
        return of

    of = one()
    if tokens:
        raise Bad(f"schema: cannot parse the type {text}")
    return of


class Reader:
    """Decodes values by "Encoding of payloads"."""

    PLAIN = {"u8", "u16", "u32", "u64", "u128", "i64", "f32", "f64", "bool", "string", "bytes"}
    BITS = {"u16": 16, "u32": 32, "u64": 64, "u128": 128}

    def __init__(self, schema, data):
        self.schema, self.data, self.at = schema, data, 0

    def take(self, length):
        if length > len(self.data) - self.at:
            raise Bad(f"at byte {self.at}: {length} bytes are needed, {len(self.data) - self.at} are left")
        self.at += length
        return self.data[self.at - length : self.at]

    def integer(self, bits):
        first = self.take(1)[0]
        if first <= 250:
            return first
        if first == 255:
            raise Bad(f"at byte {self.at}: no number starts with 255")
        size = 2 << (first - 251)
        value = int.from_bytes(self.take(size), "little")
        smaller = 250 if size == 2 else (1 << (4 * size)) - 1
        if size * 8 > bits or value <= smaller:
            raise Bad(f"at byte {self.at}: {value} is not in its shortest form, or beyond {bits} bits")
        return value

    def flag(self):
        byte = self.take(1)[0]
        if byte > 1:
            raise Bad(f"at byte {self.at}: {byte} is neither 0 nor 1")
        return byte == 1

    def read(self, of):
        form = of[0]
        if form == "named":
            return self.named(of[1])
        if form == "u8":
            return self.take(1)[0]
        if form in self.BITS:
            return self.integer(self.BITS[form])
        if form == "i64":
            zigzag = self.integer(64)
            return zigzag // 2 if zigzag % 2 == 0 else -(zigzag // 2) - 1
        if form == "f32":
            return struct.unpack("<f", self.take(4))[0]
        if form == "f64":
            return struct.unpack("<d", self.take(8))[0]
        if form == "bool":
            return self.flag()
        if form == "string":
            return self.take(self.integer(64)).decode()
        if form == "bytes":
            return self.take(self.integer(64))
        if form == "list":
            return [self.read(of[1]) for _ in range(self.integer(64))]
        if form == "array":
            return [self.read(of[1]) for _ in range(of[2])]
        if form == "tuple":
            return [self.read(inner) for inner in of[1:]]
        if form == "option":
            return self.read(of[1]) if self.flag() else None
        if form == "map":
            entries = [(self.read(of[1]), self.read(of[2])) for _ in range(self.integer(64))]
            if any(a >= b for (a, _), (b, _) in zip(entries, entries[1:])):
                raise Bad("the keys of a map do not ascend")
            return dict(entries)
        raise Bad(f"there is no type {form}")

    def named(self, name):
        if name in self.schema.structs:
            self.schema.seen.add(name)
            return {field: self.read(of) for field, of in self.schema.structs[name]}
        index, variants = self.integer(32), self.schema.enums[name]
        if index >= len(variants):
            raise Bad(f"{name} has no variant {index}")
        variant, of = variants[index]
        self.schema.seen.add(f"{name}.{variant}")
        return variant if of is None else {variant: self.read(of)}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def vectors(numbers, size):
    """Vectors that are stored one after the other."""
    if len(numbers) % size:
        raise Bad(f"{len(numbers)} numbers are no vectors of {size}")
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def form(values, coordinates):
    return sum(value * y * y for value, y in zip(values, coordinates, strict=True))


def scores_of_hpg(record, dim, query):
    (mode, parameters) = next(iter(record["parameters"].items()))
    if mode in ("Explicit", "Exact"):
        eigens = parameters if mode == "Explicit" else parameters["eigens"]
        return [form(e["eigenvalues"], [dot(v, query) for v in vectors(e["eigenvectors"], dim)]) for e in eigens]
    if mode == "Factored":
        recent = [dot(v, query) for v in vectors(parameters["recent_queries"], dim)]
        scores = []
        for model in parameters["models"]:
            values = model["eigenvalues"]
            x = [dot(v, query) for v in vectors(model["basis"], dim)] + recent
            rows = vectors(model["basis_coefficients"] + model["recent_coefficients"], max(len(values), 1))
            y = [sum(x_i * row[j] for x_i, row in zip(x, rows, strict=True)) for j in range(len(values))]
            scores.append(form(values, y))
        return scores
    return None


def scores_of(learner, query):
    """Scores by model; none for algorithms whose scores the documentation does not define."""
    length = math.sqrt(dot(query, query))
    if len(query) != learner["dim"] or not length > 0:
        raise Bad(f"the query must have {learner['dim']} components, not all 0")
    query, state = [x / length for x in query], learner["state"]
    scores = None
    if isinstance(state, dict) and "Hpg" in state:
        scores = scores_of_hpg(state["Hpg"], learner["dim"], query)
    elif isinstance(state, dict) and "ParameterFree" in state:
        record = state["ParameterFree"]
        plain = scores_of_hpg(record["hpg"], learner["dim"], query)
        sizes = [max(0.0, bettor["wealth"] * bettor["fraction"]) for bettor in record["bettors"]]
        scores = plain and [size * score for size, score in zip(sizes, plain, strict=True)]
    return scores and dict(zip(learner["models"], scores, strict=True))


def read_lane(schema, lane, query):
    _, head = schema.open(lane["head"], "HeadRecord")
    counts, spaces, previous = Counter(), {}, b""
    for key, value in lane["records"]:
        if key <= previous:
            raise Bad(f"the key {key!r} does not ascend")
        letter, rest, previous = chr(key[0]), key[1:].decode(), key
        if letter not in schema.by_key:
            raise Bad(f"unknown key {key!r}")
        name, record = schema.open(value, schema.by_key[letter])
        counts[name] += 1
        if name == "LaneRecord":
            if rest:
                raise Bad(f"unknown key {key!r}")
            continue
        space = rest
        if name == "RequestRecord":
            space, zero, _ = rest.partition("\0")
            if not zero:
                raise Bad(f"unknown key {key!r}")
        found = spaces.setdefault(space, {"requests": 0})
        if name == "RequestRecord":
            found["requests"] += 1
        elif name == "SpaceRecord":
            found["counts"] = record["join"]["counts"]
        else:
            found.update({field: record[field] for field in ("algorithm", "models", "dim", "version", "learned")})
            if query is not None:
                found["scores"] = scores_of(record, query)
    about = {"generation": lane["generation"], "epoch": head["epoch"], "dead": head["queries_dead"] + head["rewards_dead"]}
    return {**about, "records": dict(counts), "spaces": spaces}


def read_map(entries):
    """The generations of every lane, by "Generations"."""
    values = {}
    for key, part in sorted(entries.items()):
        if key[:1] not in (b"h", b"r"):
            raise Bad(f"unknown key {key!r}")
        values[key[:-4]] = values.get(key[:-4], b"") + part
    heads, versions = {}, {}
    for place, value in values.items():
        length = int.from_bytes(place[1:3], "big")
        lane, rest = place[3 : 3 + length].decode(), place[3 + length :]
        if len(rest) != (8 if place[:1] == b"h" else 12):
            raise Bad(f"unknown key {place!r}")
        (checksum,), generation = struct.unpack_from("<Q", value), int.from_bytes(rest[:8], "big")
        if xxhash and xxhash.xxh3_64_intdigest(place + value[8:]) != checksum:
            raise Bad(f"the checksum of {place!r} does not match")
        if place[:1] == b"h":
            number, total = struct.unpack_from("<QQ", value, 8)
            heads.setdefault(lane, {})[generation] = (number, total, value[24:])
        else:
            there, size = struct.unpack_from("<BI", value, 8)
            record = value[13 + size :] if there else None
            versions.setdefault(lane, []).append((generation, value[13 : 13 + size], checksum, record))
    lanes = {}
    for lane, generations in heads.items():
        for generation, (number, total, head) in generations.items():
            # In the order of keys, so the newest version of a record comes last.
            newest = {key: (checksum, record) for of, key, checksum, record in versions[lane] if of <= generation}
            kept = {key: found for key, found in newest.items() if found[1] is not None}
            if (number, total) != (len(kept), sum(checksum for checksum, _ in kept.values()) % 2**64):
                raise Bad(f"generation {generation} of {lane} is not intact")
            records = [(key, kept[key][1]) for key in sorted(kept)]
            lanes.setdefault(lane, {})[generation] = {"head": head, "records": records}
    return lanes


def plain(value):
    """A value as JSON has it."""
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return value


def read_file(path):
    with open(path, "rb") as file:
        return file.read()


def main(arguments):
    if len(arguments) < 2:
        raise Bad(__doc__)
    schema = Schema(read_file(arguments[0]).decode())
    output = {"checksums": xxhash is not None}
    if arguments[1] == "--golden":
        files = {}
        for path in arguments[2:]:
            try:
                name, value = schema.open(read_file(path))
            except Bad as problem:
                raise Bad(f"{path}: {problem}") from None
            files[path] = {"record": name, "value": plain(value)}
        output.update(files=files, unseen=schema.unseen())
    elif arguments[1] == "--map":
        entries = json.loads(read_file(arguments[2]))
        decode = base64.b64decode
        output["lanes"] = plain(read_map({decode(key): decode(value) for key, value in entries.items()}))
    else:
        query = json.loads(arguments[2]) if len(arguments) > 2 else None
        _, backup = schema.open(read_file(arguments[1]), "Backup")
        output["lanes"] = {lane["lane"]: read_lane(schema, lane, query) for lane in backup["lanes"]}
    print(json.dumps(output))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Bad, OSError, ValueError) as problem:
        sys.exit(f"read_backup.py: {problem}")
