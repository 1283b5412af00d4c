"""The Python front doors: ``LLM`` for offline work and ``serve`` for the OpenAI-compatible server."""

import contextlib
import json
import operator
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import glmjax
from glmjax.checkpoint import load_checkpoint, load_config
from glmjax.cli_interrupt import in_order
from glmjax.config import GLMConfig, token_ids
from glmjax.cuda_plugin import expect_no_libraries
from glmjax.demo import build_demo
from glmjax.engines import build_engine, build_pair, build_role
from glmjax.errors import CheckpointError, ConfigError, RequestError
from glmjax.options import EngineOptions, engine_options
from glmjax.processes import serve_pair
from glmjax.progress import Progress
from glmjax.serving.chat import ChatTemplate
from glmjax.serving.clock import Clock
from glmjax.serving.disaggregated import AnyEngine
from glmjax.serving.http import HttpOptions, build_app
from glmjax.serving.server import Server, check_port
from glmjax.serving.tokenizer import Tokenizer
from glmjax.types import RequestOutput, SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int]


class LLM:
    """A loaded model for offline use.

    Compiled programs are kept in ``~/.cache/glmjax/jax`` (``GLMJAX_CACHE``, or jax's own ``JAX_COMPILATION_CACHE_DIR``,
    say otherwise; ``JAX_ENABLE_COMPILATION_CACHE=false`` keeps none).

    Args:
      model: path of a checkpoint (Hugging Face or Orbax folder), or ``"demo"``.
      options: see ``EngineOptions``; for example ``dtype="float32"``, ``max_model_len=8192``.

    Raises:
      ConfigError: an option is unknown or cannot work with this model.
      CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, model: str | Path, **options: Any):
        expect_no_libraries()
        settings = engine_options(**options)
        if settings.prefill is not None and settings.connector not in ("auto", "local"):
            raise ConfigError(
                f"connector={settings.connector!r} works between processes, which serve() starts; LLM has both engines "
                "in this one: leave connector out"
            )
        self.model_path = find_model(model)
        self.layout = settings.layout
        config = load_config(self.model_path)
        for layout in (settings.layout, settings.prefill, settings.decode):
            if layout is not None:
                layout.check_model(config, settings.block_size)
        drafts = settings.num_speculative_tokens
        if drafts and not config.num_nextn_predict_layers:
            raise ConfigError(
                f"num_speculative_tokens={drafts} needs an MTP layer, and {self.model_path} has none "
                "(num_nextn_predict_layers=0): leave it at 0"
            )
        enable_compilation_cache()
        self.tokenizer = Tokenizer.from_dir(self.model_path) if (self.model_path / "tokenizer.json").exists() else None
        self.sampling_defaults, eos_ids = _generation_config(self.model_path, config)
        self.config, self._engine = self._build(settings, eos_ids)
        self._template: ChatTemplate | None = None

    def _build(self, settings: EngineOptions, eos_ids: Sequence[int]) -> tuple[GLMConfig, AnyEngine]:
        if settings.role is not None:
            return build_role(self.model_path, self.tokenizer, settings, eos_ids)
        if settings.prefill is not None:
            return build_pair(self.model_path, self.tokenizer, settings, eos_ids)
        mtp = settings.num_speculative_tokens > 0
        config, params = load_checkpoint(self.model_path, settings.dtype, settings.layout, mtp=mtp)
        return config, build_engine(config, params, self.tokenizer, settings, eos_ids)

    @property
    def engine(self) -> AnyEngine:
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts and returns one output per prompt, in order.

        Args:
          prompts: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, token ids, or a list of any of these.
          sampling_params: one for all or one per prompt; None takes the checkpoint's own defaults.
          use_tqdm: show progress: a bar on a terminal or in a notebook, else lines of the log.

        Raises:
          RequestError: a prompt cannot be served; nothing is generated then.
        """
        many = _prompt_list(prompts)
        each = self._sampling(sampling_params, len(many))
        requests = [(*self._tokens(p), s) for p, s in zip(many, each, strict=True)]
        batch = uuid.uuid4().hex[:8]
        handles = []
        try:
            for i, (ids, text, sampling) in enumerate(requests):
                handles.append(self._engine.submit(ids, sampling, f"{batch}-{i}", prompt=text))
            with Progress("Generating", len(handles), "requests", show=None if use_tqdm else False) as progress:
                while self._engine.has_work:
                    self._engine.step()
                    progress.update(sum(h.finished for h in handles))
        except BaseException:  # Ctrl-C too: the next call must find nothing of this one
            for handle in handles:
                self._engine.abort(handle.request_id)
            while self._engine.has_work:
                self._engine.step()
            raise
        return [handle.result(timeout=0) for handle in handles]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; see ``generate``.  The text holds the reasoning and its tags."""
        if not messages:
            raise RequestError("messages is empty", "messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        if self._template is None:
            self._template = ChatTemplate(self._need_tokenizer().chat_template, Clock())
        prompts = [
            self._template.render(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **dict(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stats(self) -> dict[str, int]:
        """Counters and gauges: "compilations", "free_blocks", "total_blocks", "num_running", ..."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached KV."""
        self._engine.reset_prefix_cache()
        self._engine.step()

    def close(self) -> None:
        """Frees the KV pool.  The object cannot be used after."""
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.model_path} has no tokenizer.json: give prompt_token_ids", "prompt")
        return self.tokenizer

    def _tokens(self, prompt: Prompt) -> tuple[Sequence[int], str | None]:
        if isinstance(prompt, Mapping):
            for name in ("multi_modal_data", "prompt_embeds"):
                if prompt.get(name) is not None:
                    raise RequestError(f"{name} is not supported: the model reads text and token ids only", name)
            if "prompt_token_ids" in prompt:
                return prompt["prompt_token_ids"], prompt.get("prompt")
            if "prompt" not in prompt:
                raise RequestError('a prompt mapping needs "prompt" or "prompt_token_ids"', "prompt")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return self._need_tokenizer().encode(prompt), prompt
        return prompt, None  # type: ignore[return-value]

    def _sampling(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = SamplingParams(**self.sampling_defaults)
        if isinstance(given, SamplingParams):
            return [given] * count
        if isinstance(given, Mapping):
            names = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise RequestError(f"write SamplingParams({names}) instead of a mapping", "sampling_params")
        if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
            raise RequestError(
                f"sampling_params must be SamplingParams or a list of them, got {given!r}", "sampling_params"
            )
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts", "sampling_params")
        return given


def serve(
    model: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    block: bool = True,
    served_model_name: str | Sequence[str] | None = None,
    api_key: str | Sequence[str] | None = None,
    max_num_queued_requests: int | None = None,
    **options: Any,
) -> Server:
    """Serves a model with OpenAI's HTTP API.

    Args:
      model, options: as for ``LLM``.
      port: 0 takes a free one; the handle's ``url`` says which.
      block: wait until interrupted; else return a handle with ``url`` and ``close()``.
      served_model_name: what clients call the model; the path by default.
      api_key: if given, clients must send one of them as a Bearer token.
      max_num_queued_requests: more waiting requests get a 503.
    """
    expect_no_libraries()
    names = [served_model_name] if isinstance(served_model_name, str) else served_model_name or [str(model)]
    keys = [api_key] if isinstance(api_key, str) else api_key or ()
    if not all(keys):
        raise ConfigError("api_key is empty: leave it out to serve without a key")
    if max_num_queued_requests is not None and max_num_queued_requests < 1:
        raise ConfigError(f"max_num_queued_requests must be at least 1, got {max_num_queued_requests}")
    settings = engine_options(**options)
    check_port(host, port)
    if settings.prefill is not None and settings.connector != "local":
        of_both = {
            "served_model_name": names,
            "api_key": keys or None,
            "max_num_queued_requests": max_num_queued_requests,
        }
        server, pair = serve_pair(str(model), host, port, settings, of_both, keys)
        if block:
            sys.stdout.write(f"Prefill engine on {pair.prefill}, decode engine on {pair.decode}\n")
        return _until_interrupted(server, names, keys, block)
    if jax.process_count() > 1:
        raise ConfigError(
            f"serve works in one process, and this is one of {jax.process_count()}: requests would reach only one of "
            "them; use LLM, with the same calls in each"
        )
    llm = LLM(model, **options)
    if llm.tokenizer is None:
        llm.close()
        raise ConfigError(f"{llm.model_path} has no tokenizer.json, which the server needs")
    http = HttpOptions(
        model_names=names,
        version=glmjax.__version__,
        api_keys=keys,
        max_num_queued_requests=max_num_queued_requests,
        sampling_defaults=llm.sampling_defaults,
        role=settings.role,
    )
    llm.engine.start()
    try:
        app = build_app(llm.engine, llm.tokenizer, http)
        server = Server(app, host, port, on_close=llm.close, fault=lambda: llm.engine.fault)
    except BaseException:
        llm.close()
        raise
    if block and settings.role is not None:
        handoff = llm.engine.scheduler.ranks[0].handoff
        assert handoff is not None
        sys.stdout.write(
            f"This is a {settings.role} engine, with connector {handoff.connector.info.connector}. Once there is one "
            "of either role: glmjax proxy PREFILL_URL DECODE_URL\n"
        )
    return _until_interrupted(server, names, keys, block)


def _until_interrupted(server: Server, names: Sequence[str], keys: Sequence[str], block: bool) -> Server:
    if block:
        announce(server, names[0], keys[0] if keys else None)
        with in_order():
            server.wait()
    return server


def announce(server: Server, name: str, api_key: str | None = None) -> None:
    """Says on standard output where the server is, and a command that tries it."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    key = f" -H 'Authorization: Bearer {api_key}'" if api_key else ""
    curl = f"curl{key} {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    sys.stdout.write(f"Serving {name} on {server.url}\nTry it:\n  {curl}\n")
    sys.stdout.flush()


def find_model(model: str | Path) -> Path:
    """The folder of a model: a path, or ``"demo"``, which is built once in the user's cache folder.

    Raises:
      CheckpointError: there is no such path, and it looks like the name of a model on Hugging Face's Hub.
    """
    if str(model) != "demo":
        path = Path(model)
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)) and not path.exists():
            raise CheckpointError(
                f"{model} not found: if it is on Hugging Face's Hub, download it first: hf download {model} "
                f"--local-dir {path.name}; then give that folder"
            )
        return path
    root = _cache_folder()
    path = root / "demo"
    if not (path / "config.json").exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError:
            path = Path(tempfile.mkdtemp(prefix="glmjax-")) / "demo"
        try:
            with in_order():
                build_demo(path)
        except CheckpointError:
            # Another process may have built it meanwhile.
            if not (path / "config.json").exists():
                raise
    return path


def _generation_config(path: Path, config: GLMConfig) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Sampling defaults and end-of-sequence ids: ``generation_config.json`` adds to ``config.json``."""
    file = path / "generation_config.json"
    try:
        raw = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as e:
        raise ConfigError(f"{file} is not valid JSON: {e}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold an object, got {type(raw).__name__}")
    eos = token_ids(f"{file.name}: eos_token_id", raw.get("eos_token_id"))
    names = ("temperature", "top_p", "top_k", "min_p")
    defaults = {k: raw[k] for k in names if raw.get(k) is not None}
    if raw.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    try:
        SamplingParams(**defaults)
    except RequestError as e:
        raise ConfigError(f"{file}: {e}") from None
    return defaults, tuple(dict.fromkeys((*config.eos_token_ids, *eos)))


def _prompt_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        prompts = list(prompts)
    except TypeError:
        raise RequestError(f"a prompt is text, token ids or a mapping, got {prompts!r}", "prompt") from None
    if not prompts:
        return []
    try:
        operator.index(prompts[0])
    except TypeError:
        return prompts
    return [prompts]


def enable_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that the next start is quick, unless jax has been told where to."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = _cache_folder() / "jax"
    with contextlib.suppress(OSError):  # where nothing can be kept, jax would warn of every program
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _cache_folder() -> Path:
    return Path(os.environ.get("GLMJAX_CACHE") or Path.home() / ".cache" / "glmjax")
