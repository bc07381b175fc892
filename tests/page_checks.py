"""Checks of an open explorer page: what it computes, and what its server refuses."""

import base64
import http.client
import json
import urllib.request
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from evals.tasks import knn, pairs, retrieval, zeroshot


def agree_with_the_tasks(page, seed):
    """Compare the page's arithmetic with `evals.tasks`, on encodings of ones and minus ones, which have ties of every kind."""
    rng = np.random.default_rng(seed)
    units, d, n, m, classes = 16, 4, 30, 40, 5

    def drawn(rows):
        found = rng.choice([-1.0, 1.0], (max(4, rows // 3), units, d))
        return (found[rng.integers(0, len(found), rows)] / 8).astype(np.float32)  # of norm one, and many of them equal

    left, right = drawn(n), drawn(m)
    labels, bank_labels = rng.integers(0, classes, n), rng.integers(0, classes, m)
    owner, kinds = np.sort(rng.integers(0, n, m)), rng.integers(0, 3, n)
    true, false = drawn(n), drawn(n)
    on = np.zeros(units, np.int64)
    on[rng.choice(units, rng.choice([1, 4, 16]), replace=False)] = (
        1  # norms that are powers of two, so that nothing is rounded
    )
    kept = torch.from_numpy((left * on[:, None]).reshape(n, -1))
    flat = {
        name: torch.from_numpy(array.reshape(len(array), -1))
        for name, array in (("right", right), ("true", true), ("false", false))
    }
    weights = flat["right"][:classes]
    near = knn.find_nearest(kept, torch.from_numpy((right * on[:, None]).reshape(m, -1)), 7)
    expected = {
        "acc1": zeroshot.score([kept], weights, torch.from_numpy(labels)).metrics["acc1"],
        "mean_per_class_recall": zeroshot.score([kept], weights, torch.from_numpy(labels)).metrics[
            "mean_per_class_recall"
        ],
        "macro": pairs.score(kept, flat["true"], flat["false"], [str(k) for k in kinds]).metrics["macro"],
        "mean_R@5": retrieval.score(kept, flat["right"], torch.from_numpy(owner)).metrics["mean_R@5"],
        "acc1_k7": knn.score(
            near, torch.from_numpy(bank_labels), torch.from_numpy(labels), classes, (7,), 0.07, 7
        ).metrics["acc1_k7"],
    }
    side = left.transpose(1, 0, 2)
    given = {
        "acc1": ("zeroshot", {"left": side, "right": right[:classes].transpose(1, 0, 2), "labels": labels}, {}),
        "macro": ("pairs", {"left": (left * (true - false)).sum(-1).T, "kinds": kinds}, {"kinds": ["0", "1", "2"], "average": "macro"}),
        "mean_R@5": ("retrieval", {"left": side, "right": right.transpose(1, 0, 2), "owner": owner}, {"k": 5}),
        "acc1_k7": ("knn", {"left": side, "right": right.transpose(1, 0, 2), "labels": labels, "bank_labels": bank_labels},
                    {"k": 7, "temperature": 0.07, "classes": classes}),
    }  # fmt: skip
    given["mean_per_class_recall"] = given["acc1"]
    for metric, (kind, arrays, facts) in given.items():
        layout, data = [], b""
        for name, array in arrays.items():
            dtype = "f" if array.dtype.kind == "f" else "i"
            layout.append({"name": name, "dtype": dtype, "shape": list(array.shape), "offset": len(data)})
            data += np.ascontiguousarray(array, "<f4" if dtype == "f" else "<i4").tobytes()
        told = {"kind": kind, "metric": metric, "facts": facts, "layout": layout}
        value = page.evaluate(
            """async ([facts, data, orders]) => {
                const { TaskScores } = await import("/page/scores.js");
                const score = await new TaskScores(facts, Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer).prepare();
                return orders.map((on) => score.set(Uint8Array.from(on)).value).at(-1);
            }""",
            [told, base64.b64encode(data).decode(), [rng.integers(0, 2, units).clip(1 - on).tolist(), on.tolist()]],
        )
        assert value == pytest.approx(expected[metric], abs=1e-12), (metric, seed)


def refuses(address, world):
    """Send what no page of the explorer sends."""
    before = sorted(world.glob("*.json"))
    own = {"x-sparo": "explore"}
    with urllib.request.urlopen(f"{address}facts") as answer:
        one = json.load(answer)["sides"][0]["id"]
    chosen = {"chosen": [0], "revision": ""}
    asked = {
        "another host": ("GET", "/facts", None, {"Host": "evil.example"}, 400),
        "a form": ("POST", f"/save/{one}", chosen, {}, 403),
        "another origin": ("POST", f"/save/{one}", chosen, {**own, "Origin": "http://evil.example"}, 403),
        "out of range": ("POST", f"/save/{one}", {**chosen, "chosen": [4]}, own, 400),
        "no number": ("POST", f"/save/{one}", {**chosen, "chosen": ["x"]}, own, 400),
        "nothing chosen": ("POST", f"/save/{one}", {**chosen, "chosen": []}, own, 400),
        "a number beyond all": ("POST", f"/save/{one}", b'{"chosen": [1e400], "revision": ""}', own, 400),
        "a key that is no number": ("POST", f"/save/{one}", {**chosen, "names": {"1e400": "x"}}, own, 400),
        "names of slots that are none": ("POST", f"/save/{one}", {**chosen, "names": {"9": "x"}}, own, 400),
        "another revision": ("POST", f"/save/{one}", {**chosen, "revision": "f" * 64}, own, 409),
        "a server that was there before": ("POST", f"/save/{one + 1}", chosen, own, 400),
        "another checkpoint": ("POST", "/search/7", {"text": "red"}, own, 400),
        "an empty text": ("POST", f"/search/{one}", {"text": " "}, own, 400),
        "no JSON": ("POST", f"/search/{one}", b"[" * 100_000, own, 400),
        "too much": ("POST", f"/search/{one}", b" " * (5 << 20), own, 413),
        "an image that is none": ("GET", "/image/12", None, {}, 400),
        "a task that is none": ("GET", f"/task/{one}/9", None, {}, 400),
        "a file of ours": ("GET", "/page/../app.py", None, {}, 404),
        "an image of the disk": ("POST", f"/captions/{one}", {"image": "/etc/passwd", "captions": ["x"]}, own, 400),
    }
    for name, (method, path, body, headers, status) in asked.items():
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
        connection.request(method, path, body if isinstance(body, bytes) or body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        told = answer.read().decode()
        assert answer.status == status and "Traceback" not in told, (name, answer.status, told)
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        connection.close()
    assert sorted(world.glob("*.json")) == before
