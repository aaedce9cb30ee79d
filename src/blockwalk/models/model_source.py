"""The model that a user names, and what is there under that name. No torch.

A name is the folder of a model, a block store, a GGUF file, or a name of the hub: ``owner/name``,
``owner/name@revision``, or ``owner/name/file.gguf``. A run makes one :class:`ModelSource` of it and
hands that on in place of the name: each fact is looked up once, when it is first asked for."""

from __future__ import annotations

import copy
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from blockwalk.models import gguf, hub
from blockwalk.models.gguf_folder import MADE, folder_of
from blockwalk.models.layer_counts import refuse_counts, tensors_of
from blockwalk.models.quantised import KEYS, quantisation
from blockwalk.plan.placement import Codec
from blockwalk.system.atomic_files import read_json, read_sealed, reading
from blockwalk.system.lfs import refuse_pointer
from blockwalk.system.paths import StrPath

INDEX = "model.safetensors.index.json"
STORE_INDEX = "store.json"
"""The file that makes a folder a block store."""
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""The files that hold a whole checkpoint, best first; each may be cut in parts, which an index of
its name lists."""
_PART = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
"""The name of a part of a checkpoint that an index lists."""
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*")
"""Files beside the weights: configuration, tokenizer, the indexes of parts, licence."""
_FORM = "config.json, *.safetensors or pytorch_model.bin; or name a .gguf file"


class ModelSource(str):
    """A model's name as the user wrote it, which knows the folder, the codec and the configuration
    of the model. It is a path like the name itself."""

    @cached_property
    def _on_hub(self) -> hub.HubName | None:
        """The parts of a name of the hub; None for what is on this machine."""
        return hub.hub_name(self)

    @cached_property
    def gguf_file(self) -> Path | None:
        """The GGUF file that is named: itself, one of the hub's, or the only weights in a folder
        without configuration.

        Raises:
            ValueError: the hub has no such file, or a folder has several.
        """
        path = Path(self)
        named = self._on_hub
        if named and named.gguf_file:
            path = named.download(gguf.pattern_of_parts(named.gguf_file)) / named.gguf_file
            if not path.is_file():
                raise ValueError(f"model: the hub's {named.repository} has no {named.gguf_file}")
        if path.is_file():
            return path if path.suffix == ".gguf" else None
        stands_for_gguf = (path / MADE).is_file()
        if (path / "config.json").is_file() and not stands_for_gguf:
            return None
        files = sorted({gguf.parts_of(file)[0] for file in path.glob("*.gguf")})
        if len(files) > 1:
            raise ValueError(
                f"model: {path} holds several GGUF files, {', '.join(p.name for p in files)}: name"
                " one of them"
            )
        if stands_for_gguf:
            return Path(os.readlink(files[0]))
        return files[0] if files else None

    @cached_property
    def folder(self) -> Path:
        """The folder with the configuration and the tokenizer: the one that is named, the hub's in
        its cache, or the one that stands for a GGUF file.

        Raises:
            ValueError: there is no such thing; what is there instead, and what to do.
        """
        if self.gguf_file is not None:
            return folder_of(self.gguf_file)
        path = Path(self)
        if path.is_dir():
            return path
        if path.is_file():
            raise ValueError(f"model: {self} is a file; give the folder of a model ({_FORM})")
        if self._on_hub:
            return self._on_hub.download(*_COMPANIONS)
        raise ValueError(
            f"model: there is no folder {self}; give that of a downloaded model ({_FORM})"
        )

    @cached_property
    def weights_folder(self) -> Path:
        """The folder with the weights too, which the hub is asked for where they are not in its
        cache.

        Raises:
            ValueError: as :attr:`folder`.
        """
        folder = self.folder
        if self._on_hub is None or self.gguf_file is not None:
            return folder
        for single in SINGLE_FILES:
            parts = listed_parts(folder, single)
            self._on_hub.download(*(parts or [single]))
            if parts or (folder / single).is_file():
                break
        return folder

    @cached_property
    def packed(self) -> bool:
        """Whether the name is a block store's."""
        return Path(self, STORE_INDEX).is_file()

    @cached_property
    def codec(self) -> Codec | None:
        """The codec that most weights come in, packed or as downloaded, where it is one of codes,
        which are read as they lie; else None.

        Raises:
            ValueError: there is no such model, or its weights are in a form that is not read.
        """
        if self.packed:
            file = Path(self, STORE_INDEX)
            with reading(file):
                codec = Codec(read_sealed(file)["codec"])
        elif self.gguf_file is not None:
            codec = gguf.read_header(self.gguf_file).main_codec
        elif Path(self).is_file() or self.quantisation is None:  # a config.json alone
            return None
        else:
            codec = self.quantisation[0]
        return codec if codec.encoded else None

    @property
    def form(self) -> str:
        """The name of :attr:`codec` in the format of the model's files; empty where it is None."""
        if self.codec is None:
            return ""
        return str(self.codec) if self.gguf_file is None else gguf.name_of(self.codec)

    @cached_property
    def quantisation(self) -> tuple[Codec, dict[str, Any]] | None:
        """The codec of the matrices that a tool has quantised, and what it says of them; else
        None."""
        config = self.folder / "config.json"
        return quantisation(self.config_values, config) if config.is_file() else None

    @property
    def repository(self) -> str:
        """The name that an adapter gives its base: the hub's repository, with the GGUF file in it
        that was named, or the path as it is."""
        if self._on_hub is None:
            return str(self)
        return "/".join(filter(None, (self._on_hub.repository, self._on_hub.gguf_file)))

    @property
    def revision(self) -> str | None:
        """The revision of the hub's repository that was named; else None."""
        return self._on_hub.revision if self._on_hub else None

    @cached_property
    def config_file(self) -> Path:
        """The model's ``config.json``: the named file itself, or the one in the folder.

        Raises:
            ValueError: there is no such folder or no ``config.json`` in it; what is there instead,
                and what to do.
        """
        path = Path(self)
        if path.suffix == ".json" and path.is_file():
            return path
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"model: {self.folder} has no config.json; give the folder of a model ({_FORM})"
            )
        return self.folder / "config.json"

    @cached_property
    def config_values(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        with reading(self.config_file):
            return dict(read_json(self.config_file))

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the text decoder, as its file has it."""
        values: dict[str, Any] = self.config_values.get("text_config", self.config_values)
        return values

    @property
    def positions(self) -> int:
        """The tokens of the longest sequence that the model was made for; 0 where its configuration
        does not say."""
        config = self.text_config
        positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rotary.get("rope_type", rotary.get("type"))
        if kind not in ("linear", "dynamic", "yarn"):  # other kinds name all of them
            return positions
        unscaled = rotary.get("original_max_position_embeddings") or positions
        return max(positions, int(unscaled * rotary.get("factor", 1)))

    def configuration(self) -> Any:
        """Return a copy of the model's configuration as ``transformers`` has it.

        Raises:
            ValueError: no ``config.json``, one whose numbers do not go together, or one whose model
                needs code of its own.
        """
        return copy.deepcopy(self._configuration)

    @cached_property
    def _configuration(self) -> Any:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        file = self.config_file
        path = file if file == Path(self) else file.parent
        refuse_counts(self.config_values, file, self._tensor_count())
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, StrictDataclassError) as error:
            refuse_pointer(file)
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"model: {path} needs code of its own (auto_map in config.json), which is never"
                    " run here; read are the types of models that transformers knows"
                ) from None
            if not isinstance(error, StrictDataclassError):
                raise
            raise ValueError(f"model: {path}: {' '.join(str(error).split())}") from None
        config.name_or_path = self.repository  # what an adapter says of its base
        # the model that is built computes with numbers
        for part in (config, config.get_text_config()):
            for key in KEYS:
                vars(part).pop(key, None)
        return config

    def _tensor_count(self) -> int | None:
        """Return the number of tensors in a checkpoint's files on this machine; None where no file
        tells it at once."""
        for single in SINGLE_FILES if Path(self) != self.config_file else ():
            file = self.folder / single
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                with reading(index):
                    return len(read_json(index)["weight_map"])
            if file.suffix == ".safetensors" and file.is_file():
                return tensors_of(file)
        return None

    def require_config(self) -> Path:
        """Return the folder of the model, which holds its ``config.json``.

        Raises:
            ValueError: as :attr:`config_file`.
        """
        return self.config_file.parent

    def require_weights(self) -> None:
        """Check that the folder holds weights: a block store, or a checkpoint that is all there.

        Raises:
            ValueError: it does not; as :meth:`require_config` and :meth:`checkpoint_files`.
        """
        self.require_config()
        if not (self.weights_folder / STORE_INDEX).is_file():
            self.checkpoint_files()

    def checkpoint_files(self) -> list[str]:
        """Return the files that hold the weights, by name: one whole file, or the parts that an
        index lists; safetensors where there are any, else ``.bin``.

        Raises:
            ValueError: there are none, or the index lists one that is missing.
        """
        folder = self.weights_folder
        for single in SINGLE_FILES:
            if (folder / single).is_file():
                return [single]
            if parts := listed_parts(folder, single):
                missing = [part for part in parts if not (folder / part).is_file()]
                if missing:
                    raise ValueError(
                        f"model: {folder} is incomplete: its index lists {', '.join(missing)},"
                        " which is not there"
                    )
                return parts
        if (folder / MADE).is_file():
            return sorted(path.name for path in folder.glob("*.gguf"))
        if parts := sorted(path.name for path in folder.iterdir() if _PART.fullmatch(path.name)):
            index = _PART.sub(r"\1.\2.index.json", parts[0])
            raise ValueError(
                f"model: {folder} holds parts of a checkpoint, {parts[0]} and {len(parts) - 1}"
                f" more, and not the index that lists them ({index}): download it too"
            )
        raise ValueError(
            f"model: {folder} has neither model.safetensors nor {INDEX}, and no pytorch_model.bin"
        )


def model_source(name: StrPath) -> ModelSource:
    """Return the source of a model: ``name`` itself where it is one."""
    return name if isinstance(name, ModelSource) else ModelSource(os.fspath(name))


def listed_parts(folder: Path, single: str) -> list[str]:
    """Return the parts that a single file is cut in, by the index of its name; none without an
    index.

    Raises:
        Damaged: the index lists no names of files beside it.
    """
    index = folder / f"{single}.index.json"
    if not index.is_file():
        return []
    with reading(index):
        parts = sorted(set(read_json(index)["weight_map"].values()))
        if outside := [part for part in parts if Path(part).name != part]:
            raise LookupError(f"{outside[0]!r} is no name of a file beside it")
        return parts
