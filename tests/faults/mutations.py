"""Messages for the fault tests, and seeded mutations that a hostile sender might make of them."""

import base64
import random
import tarfile
from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

MULTIPART = b"Content-Type: multipart/mixed; boundary=%s\n\n--%s\n"
ALTERNATIVE = (
    "From: Ayşe <ayse@example.org>\nTo: b@example.org\nSubject: =?utf-8?q?Toplant=C4=B1?=\n"
    "Content-Type: multipart/alternative; boundary=b\n\n--b\nContent-Type: text/plain; charset=utf-8\n\n"
    "Işık ılık.\n--b\nContent-Type: text/html; charset=windows-1254\n"
    "Content-Transfer-Encoding: quoted-printable\n\n"
    '<html><body><p>I=FE=FDk <a href=3D"http://example.org/">=FDl=FDk</a></p></body></html>\n--b--\n'
).encode()
ATTACHMENT = (
    b"From: a@example.org\nSubject: Report\nMessage-ID: <2@example.org>\nReferences: <1@example.org>\n"
    b'Content-Type: multipart/mixed; boundary="=_x"\n\n--=_x\n\nPlease see the report.\n--=_x\n'
    b"Content-Type: application/pdf; name=report.pdf\nContent-Transfer-Encoding: base64\n\n"
    + base64.encodebytes(bytes(range(256)) * 8)
    + b"--=_x--\n"
)
WRITTEN = (
    b"From: a@example.org\nTo: b@example.org\nSubject: Lunch\nDate: 1 Jan 2024 12:00:00 +0000\n\nAt noon?\n",
    ALTERNATIVE,
    ATTACHMENT,
    b"From: list@example.org\nSubject: Digest\nContent-Type: multipart/digest; boundary=d\n\n"
    b"--d\n\nSubject: one\n\nfirst\n--d\n\nSubject: two\n\nsecond\n--d--\n",
    b"From: c@example.org\nContent-Type: message/rfc822\n\nFrom: d@example.org\nSubject: in\n\ninner\n",
    b"From: shop@example.org\nSubject: Sale\nContent-Type: text/html\nList-Unsubscribe: <http://example.org/u>\n\n"
    b"<html><style>p {color: red}</style><body><table><tr><td>50 %</td></tr></table></body></html>\n",
    b"From: e@example.org\nSubject: \xfe\xfd\nContent-Type: text/plain; charset=iso-8859-9\n\n\xfe\xfd\xf0\n",
    b"Just text without any header.\n",
)  # fmt: skip


def real_messages(count):
    """Return messages of the shared set, or none without it."""
    path = SHARED / "spamassassin.tar.xz"
    if not path.exists():
        return []
    found = []
    with tarfile.open(path, "r|xz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".txt"):
                found.append(archive.extractfile(member).read())
            if len(found) == count:
                break
    return found


def _size(random_, largest):
    """Mostly small, sometimes as large as a limit allows."""
    return int(largest ** random_.uniform(0.3, 1.0))


def nest_multiparts(random_, raw):
    names = [
        b"%s%d" % (random_.choice([b"b", b"-", b"x" * 60]), number) for number in range(_size(random_, 3000))
    ]
    if random_.random() < 0.3:
        names = names[:1] * len(names)
    return b"".join(MULTIPART % (name, name) for name in names) + raw


def nest_messages(random_, raw):
    return b"Content-Type: message/rfc822\n\n" * _size(random_, 20_000) + raw


def many_parts(random_, raw):
    kind = random_.choice([b"text/html", b"text/plain", b"message/rfc822", b"multipart/mixed; boundary=c"])
    part = b"--b\nContent-Type: " + kind + b"\n\n" + raw[: _size(random_, 5000)] + b"\n--c\n\nx\n"
    return b"Content-Type: multipart/mixed; boundary=b\n\n" + part * _size(random_, 3000)


def flood_headers(random_, raw):
    header = random_.choice(
        [b"X: y\n", b"To: a@b.c, d@e.f\n", b"Received: x\n by y\n", b":\n", b"Content-Type: a/b\n"]
    )
    return header * _size(random_, 100_000) + raw


def long_header(random_, raw):
    name = random_.choice(
        [b"Subject", b"To", b"From", b"Date", b"References", b"Content-Type", b"X-Gmail-Labels"]
    )
    filling = random_.choice(
        [b"a", b"(", b"<", b'"', b"\n ", b"a@", b",", b"=?", b"boundary=", b"\xff", b" \t", b"1"]
    )
    return name + b": " + filling * _size(random_, 300_000) + b"\n" + raw


def flood_encoded_words(random_, raw):
    word = random_.choice([
        b"=?utf-8?q?a?= ", b"=?utf-8?b?xZ8=?=\n ", b"=?iso-8859-9?q?=FE?=", b"=?idna?q?a?= ", b"=?utf-8?q?",
        b"=??b??= ", b"=?undefined?b?====?= ", b"?==?",
    ])  # fmt: skip
    return b"Subject: " + word * _size(random_, 100_000) + b"\n" + raw


def break_charset(random_, raw):
    names = [
        b"idna",
        b"undefined",
        b"utf-7",
        b"utf-16",
        b"hz",
        b"iso-2022-kr",
        b"\xff",
        b"x" * 900,
        b"utf-8'",
        b"",
        b"rot13",
    ]
    for name in (b"utf-8", b"windows-1254", b"iso-8859-9", b"iso-8859-1", b"us-ascii"):
        raw = raw.replace(name, random_.choice(names))
    noise = random_.randbytes(_size(random_, 100_000))
    return b"Content-Type: text/plain; charset=" + random_.choice(names) + b"\n" + raw + noise


def huge_line(random_, raw):
    at = random_.randrange(len(raw) + 1)
    filling = random_.choice(
        [b"a", b" ", b"http://", b"=", b"\r", b"\f", b"a@b.c ", b"\xf0\x9f\x98\x80", b"&#1;", b"ab "]
    )
    return raw[:at] + filling * _size(random_, 1_000_000) + raw[at:]


def zero_bytes(random_, raw):
    mutated = bytearray(raw)
    for _ in range(_size(random_, 2000)):
        mutated.insert(random_.randrange(len(mutated) + 1), 0)
    return bytes(mutated)


HOSTILE_HTML = (
    b"<", b"<!--", b"<a", b"<a href=", b"<script>", b"</", b"&", b"&#x", b"&#99999999999;", b"<p>", b">",
    b"<style><script>", b"<![CDATA[", b"<!doctype", b"-->", b"<a href='http://x/", b"&ngE;", b"\f", b"<p \n",
    b"<a b='", b"<td><table>", "İ<STYLE>".encode(),
)  # fmt: skip


def hostile_html(random_, raw):
    pieces = random_.choices(HOSTILE_HTML, k=random_.randint(1, 3))
    return b"Subject: x\nContent-Type: text/html\n\n" + b"".join(pieces) * _size(random_, 60_000) + raw


def truncate(random_, raw):
    return raw[: random_.randrange(len(raw) + 1)]


def flip_bits(random_, raw):
    mutated = bytearray(raw or b"x")
    for _ in range(_size(random_, 500)):
        mutated[random_.randrange(len(mutated))] ^= 1 << random_.randrange(8)
    return bytes(mutated)


def shuffle_lines(random_, raw):
    lines = raw.splitlines(keepends=True)
    random_.shuffle(lines)
    return b"".join(lines * random_.randint(1, 4))


def break_transfer(random_, raw):
    encoding = random_.choice([b"base64", b"quoted-printable", b"x-uuencode", b"8bit"])
    body = (
        random_.randbytes(_size(random_, 300_000))
        if random_.random() < 0.5
        else b"=" * _size(random_, 300_000)
    )
    return b"Content-Transfer-Encoding: " + encoding + b"\nContent-Type: text/html\n" + raw + body


def repeat(random_, raw):
    """Repeat everything until it is about as large as a message may be."""
    return raw * max(2, _size(random_, 27_000_000) // (len(raw) + 1))


MUTATIONS = (
    nest_multiparts, nest_messages, many_parts, flood_headers, long_header, flood_encoded_words,
    break_charset, huge_line, zero_bytes, hostile_html, truncate, flip_bits, shuffle_lines,
    break_transfer, repeat,
)  # fmt: skip


def mutate(seed, messages):
    """Return the name of a mutation and a message that was mutated once or several times."""
    random_ = random.Random(seed)
    raw = random_.choice(messages)
    first = MUTATIONS[seed % len(MUTATIONS)]
    raw = first(random_, raw)
    while random_.random() < 0.3 and len(raw) < 2**21:
        raw = random_.choice(MUTATIONS)(random_, raw)
    return first.__name__, raw
