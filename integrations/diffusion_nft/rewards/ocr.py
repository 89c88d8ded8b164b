"""OCR: does the picture spell the text between the prompt's double quotes? Read by PP-OCR through ``rapidocr``."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from integrations.diffusion_nft.prompts import Prompt

_LINE_HEIGHT = 64  # pictures up to this height are read as one line of text, enlarged to it


class OcrReward:
    """1 − distance/length of the text asked for; NaN where the prompt quotes nothing.

    Both texts are compared in lower case without spaces. The distance is 0 if the text asked for is contained in what
    was read, else the edit distance, at most the length (as in FlowGRPO and DiffusionNFT).

    Small pictures are taken for one line of text and recognised in batches; in larger ones text is located first.
    """

    name = "ocr"

    def __init__(self) -> None:
        from rapidocr import RapidOCR  # loads 20 MB of weights: only for those who use it

        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Rec.rec_img_shape": [3, 48, 64],  # not padded to 320 columns: five times faster on two letters
                "Rec.rec_batch_num": 16,
            }
        )

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores uint8 pictures (N, H, W, 3): float64 (N,) in [0, 1] or NaN."""
        scores = np.full(len(prompts), np.nan)
        asked = {i: text for i, prompt in enumerate(prompts) if (text := _normalise(prompt.quoted or ""))}
        if asked:
            for (i, text), read in zip(asked.items(), self._read(images[list(asked)]), strict=True):
                scores[i] = similarity(text, read)
        return scores

    def _read(self, images: np.ndarray) -> list[str]:
        images = images[..., ::-1]  # the engine expects OpenCV's channel order
        if images.shape[1] > _LINE_HEIGHT:
            return [" ".join(self._engine(np.ascontiguousarray(image)).txts or ()) for image in images]
        factor = _LINE_HEIGHT / images.shape[1]
        lines = [cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC) for image in images]
        return list(self._engine.recognize_txt(lines).txts)


def similarity(asked: str, read: str) -> float:
    """1 − distance/length of ``asked``, in [0, 1]; see ``OcrReward``."""
    asked, read = _normalise(asked), _normalise(read)
    if asked in read:
        return 1.0
    return 1.0 - min(_edit_distance(asked, read), len(asked)) / len(asked)


def _normalise(text: str) -> str:
    return text.lower().replace(" ", "")


def _edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        above, row = row, [i]
        for j, y in enumerate(b, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]
