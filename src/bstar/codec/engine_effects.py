"""Which flags change neither memory nor speed: they are kept and listed in JSON, but need no note to a person.

Named by destination. What is not listed here is taken to matter.
"""

from __future__ import annotations

_SERVER = """
    host port uds root_path api_key hf_token served_model_name ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers
    ssl_keyfile enable_ssl_refresh allow_credentials allowed_headers allowed_local_media_path allowed_media_domains
    allowed_methods allowed_origins middleware h11_max_header_count h11_max_incomplete_event_size response_role
    shutdown_timeout sse_keep_alive_interval grpc grpc_port disable_fastapi_docs enable_offline_docs
    enable_request_id_headers enable_tokenizer_info_endpoint fail_on_environ_validation tool_server
"""
_LOGGING = """
    log_level log_level_http log_config_file logging_config log_error_stack max_log_len uvicorn_log_level
    disable_uvicorn_access_log disable_access_log_for_endpoints disable_log_stats disable_log_requests
    enable_log_requests enable_log_outputs enable_log_deltas enable_logging_iteration_details log_requests
    aggregate_engine_logging show_hidden_metrics_for_version otlp_traces_endpoint
    collect_detailed_traces enable_metrics enable_metrics_for_all_schedulers enable_server_load_tracking
    enable_per_request_metrics enable_mfu_metrics cudagraph_metrics kv_cache_metrics kv_cache_metrics_sample
    calculate_kv_scales enable_cache_report show_time_cost decode_log_interval
    enable_request_time_stats_logging enable_trace
    bucket_time_to_first_token jit_monitor_mode jit_monitor_verbose enable_force_include_usage
    enable_prompt_tokens_details use_tqdm_on_load ray_workers_use_nsight
    per_request_spec_decode_metrics
"""
_TEXT = """
    tokenizer tokenizer_mode tokenizer_path tokenizer_revision tokenizer_worker_num tokenizer_pool_size
    tokenizer_pool_type custom_tokenizer trust_remote_code chat_template chat_template_content_format
    default_chat_template_kwargs trust_request_chat_template trust_request_mm_kwargs tool_call_parser tool_parser
    tool_parser_plugin tool_strict_level enable_auto_tool_choice exclude_tools_when_tool_choice_none
    reasoning_parser reasoning_parser_plugin enable_reasoning reasoning_config anthropic_disabled_thinking_effort
    cohere_format cohere_is_reasoning_model guided_decoding_backend guided_decoding_disable_additional_properties
    guided_decoding_disable_any_whitespace guided_decoding_disable_fallback structured_outputs_config
    grammar_backend generation_config override_generation_config logprobs_mode max_logprobs
    return_tokens_as_token_ids tokens_only seed random_seed
"""
_FILES = """
    revision code_revision download_dir model_loader_extra_config ignore_patterns config_format pt_load_map_location
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    max_parallel_loading_workers weight_loader_disable_mmap skip_server_warmup watchdog_timeout
    distributed_timeout_seconds cpu_distributed_timeout_seconds dist_init_addr master_addr master_port node_rank
    nnodes data_parallel_address data_parallel_rpc_port data_parallel_start_rank disable_outlines_disk_cache
    disable_disk_cache swap_space allow_deprecated_quantization disable_frontend_multiprocessing
"""

WITHOUT_EFFECT = frozenset("".join((_SERVER, _LOGGING, _TEXT, _FILES)).split())


def matters(dest: str) -> bool:
    """Whether a flag may change memory or speed."""
    return dest not in WITHOUT_EFFECT
