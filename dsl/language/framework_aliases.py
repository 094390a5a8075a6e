"""Names of PyTorch, Lightning, Hugging Face, Accelerate, DeepSpeed and Megatron, and their equivalents here.

Plain data. Names are in lower case with `_`, names of values without. A test checks that every target exists.
"""

from __future__ import annotations

# (block, `block.field`, `block.field = value` or `block.field.argument`; what differs; the names)
_FIELDS = (
    # ---------------------------------------------------------------------------------------------------- length
    ("train.epochs", "", "max_epochs num_epochs num_train_epochs n_epochs nb_epochs epoch train_epochs total_epochs"),
    ("train.steps", "", "max_steps num_steps train_iters max_iters iterations total_steps train_steps n_steps "
     "num_training_steps total_num_steps total_training_steps num_iterations max_train_steps train_iterations"),
    # ------------------------------------------------------------------------------------------------------ data
    ("data.batch", "the global batch of one optimizer step, over all devices",
     "batch_size batchsize bs per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
     "micro_batch_size_per_gpu local_batch_size train_bs"),
    ("data.batch", "", "global_batch_size train_batch_size effective_batch_size total_batch_size gbs"),
    ("data.workers", "", "num_workers dataloader_num_workers n_workers loader_workers"),
    ("data.source", "", "dataset datasets train_dataset train_data training_data dataset_name data_path data_dir "
     "train_file train_files dataset_path root data_root datamodule data_module data_prefix"),
    ("data.validation", "the share that is held out", "val_split validation_split val_size eval_split "
     "validation_size validation_split_percentage val_fraction validation_fraction train_test_split "
     "eval_dataset val_dataset valid_dataset validation_dataset"),
    ("data.test", "the share for one evaluation after the training", "test_split test_size test_fraction test_dataset "
     "test_data test_file"),
    ("data.last_batch", "`drop` or `keep`", "drop_last dataloader_drop_last"),
    ("data.source.context", "", "max_length max_len seq_length seq_len sequence_length max_seq_length max_seq_len "
     "block_size context_length context_size n_ctx n_positions max_position_embeddings model_max_length cutoff_len"),
    ("data.shuffle_buffer", "", "buffer_size shuffle_buffer_size shuffle_size shuffle_buffer_len"),
    ("data.interleave", "", "cycle_length interleave_cycle num_canonical_nodes"),
    ("data.samples", "of a stream", "epoch_size epoch_length samples_per_epoch with_epoch with_length"),
    ("data.collate", "", "collate_fn data_collator collator"),
    ("data.source", "`mixture([…], weights = […])`", "data_mixture dataset_mixer blend data_blend mixture_weights "
     "interleave_datasets dataset_weights"),
    ("data.documents", "the token that ends a document", "eos_token_id eod_token eod_token_id packing "
     "reset_attention_mask reset_position_ids eod_mask_loss sample_packing document_mask"),
    ("data.sampler", "`by_length()`", "group_by_length length_grouped_sampler bucket_by_sequence_length"),
    ("data.sampler", "`weighted(…)`", "weighted_random_sampler sample_weights"),
    ("data.source.input", "", "input_column text_column image_column feature_columns input_key"),
    ("data.source.target", "", "label_column target_column label_names label_key"),
    ("data.source.augment", "", "augmentation augmentations transforms train_transform train_transforms augmentor "
     "data_augmentation"),
    ("data.source.size", "", "image_size img_size input_size resize crop_size"),
    ("data.source.samples", "", "num_samples n_samples dataset_size"),
    # --------------------------------------------------------------------------------------------------- devices
    ("devices", "", "hardware cluster resources machines compute_environment"),
    ("devices.nodes", "", "num_nodes nnodes n_nodes num_machines slurm_nodes"),
    ("devices.gpus", "", "gpu num_gpus ngpus n_gpu n_gpus devices nproc_per_node nproc gpus_per_node num_processes "
     "accelerator gpu_ids device_ids visible_devices cuda_visible_devices world_size num_devices devices_per_node"),
    ("devices.gpus", "or `cpus`: how many", "device device_type"),
    ("devices.cpus", "", "cpu use_cpu no_cuda num_cpus n_cpus"),
    ("devices.threads", "", "num_threads omp_num_threads torch_num_threads num_cpu_threads_per_process "
     "intra_op_threads cpu_threads"),
    ("devices.backend", "", "process_group_backend ddp_backend dist_backend distributed_backend comm_backend"),
    # ----------------------------------------------------------------------------------------------- parallelism
    ("parallelism", "", "strategy distributed_type distributed parallel distributed_strategy"),
    ("parallelism.data", "", "dp ddp data_parallel data_parallel_size dp_size data_parallel_degree dp_degree"),
    ("parallelism.tensor", "", "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size "
     "tensor_parallel_degree tp_degree autotp_size model_parallel_size"),
    ("parallelism.pipeline", "", "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size "
     "pipeline_parallel_degree pp_degree num_stages pipeline_stages"),
    ("parallelism.context", "", "cp cp_size context_parallel context_parallel_size context_parallel_degree "
     "sequence_parallel_size ulysses_degree sp_size"),
    ("parallelism.sequence", "", "sequence_parallel"),
    ("parallelism.zero", "from 1, optimizer state alone, to 3, parameters too",
     "zero_stage stage zero_optimization fsdp fsdp_config sharding_strategy "
     "fsdp_sharding_strategy reshard_after_forward fsdp_reshard_after_forward deepspeed deepspeed_config_file"),
    ("parallelism.replicas", "", "hybrid_shard dp_replicate data_parallel_replicate_degree "
     "zero_hpz_partition_size mics_shard_size"),
    ("parallelism.microbatches", "into how many pieces a rank's share of `data.batch` is cut",
     "accumulate_grad_batches gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps "
     "grad_accumulation grad_accumulation_steps accumulation_steps accum_steps accum_iter update_freq gas chunks "
     "num_microbatches n_microbatches micro_batches num_micro_batches"),
    ("parallelism.microbatches", "how many, not how large", "micro_batch_size microbatch_size mbs"),
    ("parallelism.schedule", "", "pipeline_schedule pp_schedule pipeline_parallel_schedule"),
    ("parallelism.virtual_stages", "", "virtual_pipeline_model_parallel_size interleave num_virtual_stages "
     "num_layers_per_virtual_pipeline_stage vpp"),
    ("parallelism.gradients", "", "ddp_comm_hook comm_hook gradient_compression communication_data_type "
     "compression_training gradient_allreduce bagua_algorithm"),
    ("parallelism.gradients.interval", "a time, as `100ms`", "sync_interval_ms"),
    ("parallelism.gradients.interval", "", "communication_interval"),
    ("parallelism.gradients.peers", "", "peer_selection_mode"),
    # ---------------------------------------------------------------------------------------------------- memory
    ("memory.recompute", "", "gradient_checkpointing activation_checkpointing checkpoint_activations "
     "activation_checkpoint grad_checkpointing use_gradient_checkpointing enable_gradient_checkpointing "
     "recompute_granularity recompute_activations recomputation fsdp_activation_checkpointing "
     "gradient_checkpointing_kwargs remat"),
    ("memory.offload", "", "cpu_offload fsdp_offload_params zero_offload offload_states"),
    ("memory.offload = optimizer", "", "offload_optimizer offload_optimizer_device optimizer_cpu_offload"),
    ("memory.offload = [optimizer, parameters]", "", "offload_param offload_params offload_param_device"),
    ("memory.offload = activations", "", "cpu_checkpointing activation_offload offload_activations"),
    ("memory.limit", "", "max_memory gpu_memory_limit memory_limit max_memory_mb"),
    # ----------------------------------------------------------------------------------------------------- train
    ("train", "", "trainer training training_arguments trainingarguments fit train_config training_args"),
    ("train.optimizer", "", "optim optimizers optimizer_type optimizer_name opt optim_args configure_optimizers"),
    ("train.optimizer = adamw", "", "adam_w_mode adamw_mode"),
    ("train.optimizer.lr", "", "learning_rate learningrate base_lr base_learning_rate max_lr peak_lr init_lr "
     "initial_lr lr0"),
    ("train.optimizer.weight_decay", "", "wd decay weightdecay l2_regularization"),
    ("train.optimizer.betas", "", "beta beta1 beta2 adam_beta1 adam_beta2"),
    ("train.optimizer.eps", "", "epsilon adam_epsilon adam_eps"),
    ("train.optimizer.freeze", "of `onebit_adam`", "freeze_step freeze_steps onebit_freeze_step"),
    ("train.lr_schedule", "", "scheduler lr_scheduler lr_scheduler_type lr_policy lr_decay_style sched scheduling "
     "learning_rate_schedule lr_scheduler_kwargs schedule_type"),
    ("train.lr_schedule.warmup", "", "warmup_steps num_warmup_steps warmup_num_steps warmup_iters warmup_ratio "
     "warmup_epochs lr_warmup_steps lr_warmup_iters warmup_proportion warmup_fraction lr_warmup_fraction"),
    ("train.lr_schedule.floor", "over the full rate", "min_lr eta_min min_lr_ratio min_lr_rate cos_min_ratio "
     "end_lr final_lr"),
    ("train.lr_schedule.factor", "", "gamma lr_gamma decay_rate"),
    ("train.lr_schedule.milestones", "times, as in `[30 epochs, 60 epochs]`", "lr_milestones lr_steps"),
    ("train.lr_schedule.rise", "", "pct_start"),
    ("train.lr_schedule.growth", "", "t_mult"),
    ("train.lr_schedule.decay", "", "num_decay_steps decay_steps lr_wsd_decay_iters"),
    ("train.lr_schedule.every", "", "step_size lr_step_size lr_drop t_0"),
    ("train.groups", "", "param_groups parameter_groups paramwise_cfg custom_keys lr_mult layerwise_lr lr_multipliers"),
    ("train.no_decay", "", "no_weight_decay no_decay_params weight_decay_exclude exclude_from_weight_decay"),
    ("train.clip", "", "gradient_clip_val gradient_clipping max_grad_norm clip_grad clip_grad_norm grad_clip "
     "gradient_clip max_norm clip_norm grad_norm_clip clipnorm grad_clip_norm global_clipnorm"),
    ("train.clip = value(0.5)", "", "clip_value clipvalue clip_grad_value clip_by_value"),
    ("train.clip", "`norm(1.0)`, `value(0.5)`", "gradient_clip_algorithm"),
    ("train.precision", "", "amp use_amp autocast mixed_precision dtype torch_dtype amp_dtype param_dtype "
     "model_dtype half_precision mixed_precision_policy data_types"),
    ("train.precision = bf16", "", "bf16 bfloat16 use_bf16 bf16_full_eval"),
    ("train.precision = fp16", "", "fp16 float16 half use_fp16 fp16_full_eval"),
    ("train.precision.level", "", "opt_level fp16_opt_level amp_level"),
    ("train.ema", "its decay", "ema_decay use_ema model_ema ema_momentum weight_averaging exponential_moving_average"),
    ("train.early_stopping", "`lowest(loss, patience = 3)`, `highest(accuracy)`",
     "earlystopping early_stop early_stopping_callback stop_early"),
    ("train.early_stopping.patience", "", "patience early_stopping_patience"),
    ("train.early_stopping.by", "", "min_delta early_stopping_threshold early_stopping_min_delta"),
    ("train.max_time", "`2h`, `30 min`", "max_duration time_budget max_train_time max_training_time max_hours timer "
     "exit_duration_in_mins"),
    ("train.seed", "", "random_seed seed_everything manual_seed data_seed rng_seed random_state torch_seed"),
    ("train.compile", "", "torch_compile compile_model dynamo dynamo_backend dynamo_config torchdynamo "
     "torch_compile_backend torch_compile_mode use_compile jit_mode"),
    ("train.deterministic", "", "full_determinism use_deterministic_algorithms cudnn_deterministic deterministic_mode"),
    # ----------------------------------------------------------------------------------------------------- model
    ("model.loss", "", "criterion loss_fn loss_function objective loss_func loss_type"),
    ("model.loss.label_smoothing", "", "label_smoothing_factor smoothing"),
    ("model.loss.ignore", "", "ignore_index ignore_label"),
    ("model.network", "", "architecture arch model_name model_name_or_path pretrained_model_name_or_path model_type "
     "backbone net module model_id base_model model_config"),
    ("model.network.layers", "", "n_layer n_layers num_layers num_hidden_layers num_blocks"),
    ("model.network.heads", "", "n_head n_heads nhead num_heads num_attention_heads"),
    ("model.network.width", "", "n_embd d_model dim hidden_size hidden_dim embedding_dim embed_dim model_dim"),
    ("model.network.vocab", "", "vocabulary vocab_size n_vocab num_embeddings padded_vocab_size"),
    ("model.network.kv_heads", "", "num_key_value_heads n_kv_heads num_kv_heads num_query_groups"),
    ("model.network.hidden", "", "intermediate_size ffn_hidden_size ffn_dim"),
    ("model.network.norm_eps", "", "rms_norm_eps layernorm_epsilon"),
    ("model.network.window", "", "sliding_window window_size"),
    ("model.network.activation", "", "hidden_act hidden_activation act_fn"),
    ("model.network.bias", "", "attention_bias"),
    ("model.network.init_std", "", "initializer_range init_method_std"),
    ("model.network.qk_norm", "", "use_qk_norm qk_layernorm"),
    ("model.network.classes", "", "num_classes num_labels n_classes nb_classes"),
    ("model.network.tie", "", "tie_weights tie_word_embeddings tie_embeddings"),
    ("model.network.features", "", "out_features units num_outputs"),
    ("model.network.channels", "", "out_channels filters num_filters"),
    ("model.network.kernel", "", "kernel_size"),
    ("model.weights", "", "pretrained init_from load_weights init_checkpoint pretrained_weights state_dict "
     "pretrained_checkpoint from_checkpoint from_pretrained weights_path"),
    ("model.weights.rename", "", "key_mapping rename_keys state_dict_mapping param_mapping"),
    ("model.weights.allow_missing", "", "ignore_mismatched_sizes missing_keys ignore_missing strict "
     "keys_to_ignore_on_load_missing"),
    ("model.weights.allow_unused", "", "unexpected_keys ignore_unexpected keys_to_ignore_on_load_unexpected "
     "exclude_keys"),
    ("model.adapter", "", "peft peft_config lora lora_config use_peft adapters use_lora"),
    ("model.adapter.rank", "", "r lora_r lora_rank"),
    ("model.adapter.alpha", "", "lora_alpha"),
    ("model.adapter.dropout", "", "lora_dropout"),
    ("model.adapter.targets", "", "target_modules lora_target_modules"),
    ("model.adapter.save", "", "modules_to_save"),
    ("model.adapter.rslora", "", "use_rslora"),
    ("model.freeze", "", "frozen freeze_layers freeze_patterns requires_grad freeze_backbone"),
    # ------------------------------------------------------------------------------- evaluate, checkpoint, log, launch
    ("evaluate", "", "evaluation validate eval val test"),
    ("evaluate.every", "", "val_check_interval check_val_every_n_epoch eval_steps eval_interval eval_every "
     "validation_interval val_interval test_interval eval_strategy evaluation_strategy do_eval eval_freq "
     "validate_every"),
    ("evaluate.metrics", "", "compute_metrics metric eval_metrics"),
    ("checkpoint", "", "save checkpointing modelcheckpoint model_checkpoint checkpoints ckpt enable_checkpointing"),
    ("checkpoint.every", "", "save_steps save_interval save_every save_strategy save_freq checkpoint_interval "
     "checkpoint_every checkpointing_steps every_n_train_steps every_n_epochs ckpt_interval ckpt_every"),
    ("checkpoint.best", "`lowest(loss)`, `highest(accuracy)`: kept beside the newest, for `--checkpoint best`",
     "load_best_model_at_end metric_for_best_model monitor save_best_only save_best best_model save_top_k "
     "save_best_checkpoint best_model_metric"),
    ("checkpoint.keep", "the newest", "save_total_limit total_limit max_checkpoints keep_last max_to_keep "
     "keep_checkpoints num_checkpoints"),
    ("checkpoint.dir", "", "checkpoint_dir ckpt_dir dirpath save_dir save_path checkpoint_path"),
    ("checkpoint.asynchronous", "", "async_save async_checkpoint async_checkpointing"),
    ("checkpoint.resume", "", "resume_from_checkpoint ckpt_path resume_from load_checkpoint auto_resume resume_path "
     "restore_from load_dir load"),
    ("log", "", "logging"),
    ("log.every", "", "log_every_n_steps logging_steps log_interval steps_per_print print_freq log_every "
     "logging_interval logging_strategy log_freq print_every"),
    ("train.hooks", 'as `python("module:object")`', "callbacks callback hook plugins on_epoch_end on_train_end "
     "extensions on_train_start trainer_callbacks"),
    ("log.loggers", 'as `python("module:object")`', "logger mlflow comet neptune wandb wandb_project trackers "
     "custom_loggers"),
    ("log.tensorboard", "", "report_to log_with tensorboard_dir use_tensorboard tensorboard_log_dir"),
    ("launch.with", "", "launcher job_launcher rdzv_backend scheduler_type"),
    ("launch.restarts", "", "max_restarts num_restarts"),
    ("launch.timeout", "", "ddp_timeout nccl_timeout dist_timeout process_group_timeout"),
    ("launch.with.partition", "", "slurm_partition queue"),
    ("launch.with.time", "", "time_limit walltime"),
    ("data", "", "dataloader data_loader train_dataloader dataloaders dataloader_config"),
)  # fmt: skip

# (a block; blocks elsewhere that are a field here)
_BLOCKS = (("data", "dataset datasets datamodule data_module train_dataset train_data training_data"),)

# (the message; the names)
_ABSENT = (
    ("no value of a metric ends a training: `train.early_stopping` ends it where none gets better",
     "stopping_threshold divergence_threshold"),
    ("the newest checkpoints are always kept: `checkpoint.keep`", "save_last"),
    ("a goal says which is better: `lowest(loss)`, `highest(accuracy)`", "greater_is_better monitor_op"),
    ("a checkpoint holds the whole state of the training; `dslc export` writes the weights alone",
     "save_only_model save_weights_only save_safetensors save_on_each_node save_16bit_model "
     "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save fsdp_state_dict_type"),
    ("a training has one length: `train.steps` or `train.epochs`", "min_epochs min_steps steps_per_epoch"),
    ("the length of an epoch follows from the data; `--set train.steps=10` makes a run short",
     "limit_train_batches overfit_batches max_train_samples train_samples"),
    ("`dslc run JOB --try` takes a few steps, evaluates, saves and resumes, and leaves nothing",
     "fast_dev_run smoke_test sanity_check sanity_steps"),
    ("every evaluation is of the whole validation split; `data.validation` sets its size",
     "limit_val_batches limit_test_batches num_sanity_val_steps max_eval_samples eval_iters eval_on_start"),
    ("there is nothing to set: evaluation takes the batches of the training, and counts every sample once",
     "per_device_eval_batch_size eval_batch_size val_batch_size test_batch_size per_gpu_eval_batch_size "
     "eval_accumulation_steps prediction_loss_only inference_mode"),
    ("there is nothing to set: batches are pinned and fetched ahead by themselves",
     "pin_memory dataloader_pin_memory persistent_workers dataloader_persistent_workers prefetch_factor "
     "dataloader_prefetch_factor non_blocking"),
    ("samples of unequal length are put together by `data.collate`",
     "padding pad_to_max_length"),
    ("there is nothing to set: a batch is what the source and `data.collate` make",
     "remove_unused_columns"),
    ("there is nothing to set: each rank is given its share of every global batch",
     "batch_sampler use_distributed_sampler replace_sampler_ddp distributed_sampler split_batches "
     "dispatch_batches even_batches reload_dataloaders_every_n_epochs"),
    ("whoever starts the processes tells them their ranks and addresses: `launch.with`",
     "node_rank machine_rank local_rank rank rdzv_id hostfile main_training_function same_network dist_url "
     "init_method"),
    ("of a job on several nodes: `dslc run JOB --rendezvous HOST[:PORT]`",
     "master_addr master_port main_process_ip main_process_port rdzv_endpoint"),
    ("there is nothing to set: what is gathered and exchanged when follows from the plan, which `dslc plan` shows",
     "find_unused_parameters ddp_find_unused_parameters gradient_as_bucket_view static_graph ddp_static_graph "
     "bucket_cap_mb ddp_bucket_cap_mb broadcast_buffers ddp_broadcast_buffers reduce_bucket_size overlap_comm "
     "allgather_bucket_size allgather_partitions reduce_scatter contiguous_gradients round_robin_gradients "
     "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters "
     "stage3_max_reuse_distance sub_group_size auto_wrap_policy fsdp_auto_wrap_policy "
     "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap min_num_params fsdp_min_num_params "
     "backward_prefetch fsdp_backward_prefetch fsdp_backward_prefetch_policy forward_prefetch fsdp_forward_prefetch "
     "limit_all_gathers use_orig_params fsdp_use_orig_params sync_module_states fsdp_sync_module_states "
     "fsdp_cpu_ram_efficient_loading fsdp_version device_mesh prescale_gradients gradient_predivide_factor "
     "partition_activations contiguous_memory_optimization zero_allow_untested_optimizer "
     "zero_force_ds_cpu_optimizer sparse_gradients no_sync"),
    ("`precision = fp16` scales the loss by itself", "loss_scale loss_scaler initial_scale_power loss_scale_window "
     "hysteresis min_loss_scale grad_scaler gradscaler dynamic_loss_scale init_scale growth_interval"),
    ("there is no switch for TensorFloat-32", "tf32 allow_tf32 float32_matmul_precision matmul_precision"),
    ("there is no quantization", "load_in_8bit load_in_4bit quantization quantization_config bnb_config quantize "
     "bnb_4bit_compute_dtype qat"),
    ("mixtures of experts are for a later version", "expert_parallel expert_parallel_size ep ep_size num_experts moe "
     "expert_model_parallel_size num_experts_per_tok"),
    ("nothing is tried out: `dslc plan` says which batch fits, and `sweep` tries learning rates",
     "auto_find_batch_size auto_scale_batch_size auto_lr_find autotuning"),
    ("losses have no weights for classes: `python(…)` takes a loss of your own",
     "class_weight class_weights pos_weight loss_weights sample_weight"),
    ("there is nothing to set: batch norm takes its statistics over all data ranks",
     "sync_batchnorm sync_bn convert_sync_batchnorm syncbn"),
    ("the run directory is named on the command line: `dslc run JOB --out DIR`",
     "output_dir default_root_dir logging_dir project_dir log_dir run_dir save_folder exp_dir out_dir "
     "overwrite_output_dir run_name experiment_name project job_name project_name exp_name version"),
    ("there is nothing to set: `dslc run` shows progress by itself",
     "disable_tqdm enable_progress_bar progress_bar enable_model_summary verbose progress_bar_refresh_rate"),
    ("that is for the command: `dslc run JOB --profile`",
     "profiler profile wall_clock_breakdown flops_profiler memory_breakdown dump_state"),
    ("the commands are `dslc run`, `dslc evaluate` and `dslc predict`", "do_train do_predict"),
    ("there is no such switch; `train.deterministic` chooses algorithms that repeat",
     "benchmark cudnn_benchmark detect_anomaly"),
    ("there are no conditionals and no loops: a job varies by `import`, params, `--set` and `sweep`",
     "if else elif for while match"),
    ("nothing is fetched or uploaded", "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo "
     "trust_remote_code use_auth_token cache_dir"),
)  # fmt: skip

# (a word or a call; the names, without `_`, `-`, `.` and blanks)
_VALUES = (
    # losses
    ("cross_entropy", "crossentropyloss nllloss nll categoricalcrossentropy sparsecategoricalcrossentropy ce celoss "
     "softmaxcrossentropy softmax classification"),
    ("mse", "mseloss l2 l2loss meansquarederror regression"),
    ("l1", "l1loss mae meanabsoluteerror"),
    ("bce", "bceloss bcewithlogitsloss bcewithlogits binarycrossentropy binarycrossentropywithlogits"),
    ("contrastive", "infonce ntxent nceloss"),
    # exchanges
    ("decentralized", "decentralizedalgorithm"),
    ("low_precision_decentralized", "lowprecisiondecentralizedalgorithm"),
    ("async_average", "asyncmodelaveragealgorithm asyncmodelaverage"),
    ("local_sgd", "postlocalsgdoptimizer postlocalsgd postlocalsgdhook periodicmodelaverager "
     "hierarchicalmodelaverager"),
    # optimizers
    ("adamw", "adamwtorch adamwtorchfused adamwhf adamwapex torchadamw adamwfused adamw8bit adamwbnb8bit pagedadamw "
     "pagedadamw8bit pagedadamw32bit decoupledadamw"),
    ("adam", "fusedadam deepspeedcpuadam cpuadam adamtorch"),
    ("sgd", "momentum sgdmomentum nesterov stochasticgradientdescent"),
    ("onebit_adam", "1bitadam zerooneadam"),
    ("qadam", "qadamoptimizer"),
    # learning rate schedules
    ("warmup_cosine", "cosine cosineannealing cosineannealinglr cosinewithwarmup getcosineschedulewithwarmup "
     "warmupcosinelr cosinedecay cosinewithminlr cosineschedule"),
    ("warmup_linear", "linear linearlr linearschedulewithwarmup getlinearschedulewithwarmup warmupdecaylr lineardecay "
     "linearwithwarmup polynomial polynomiallr"),
    ("warmup_constant", "constantwithwarmup warmuplr getconstantschedulewithwarmup"),
    ("constant", "constantlr fixed"),
    ("step", "steplr stepdecay"),
    ("multistep", "multisteplr piecewise piecewiseconstant"),
    ("one_cycle", "onecyclelr onecycle 1cycle superconvergence"),
    ("cosine_restarts", "cosinewithrestarts cosineannealingwarmrestarts cosinewithhardrestarts sgdr warmrestarts"),
    ("warmup_stable_decay", "wsd trapezoidal getwsdschedule"),
    ("exponential", "exponentiallr exponentialdecay"),
    ("plateau", "reducelronplateau reduceonplateau reducelr"),
    # precision
    ("bf16", "bfloat16 bfloat bf16mixed bf16true torchbfloat16 bfloat16mixed"),
    ("fp16", "float16 half f16 16 16mixed 16true torchfloat16 fp16mixed amp"),
    ("fp32", "float32 f32 32 32true full single float torchfloat32 no"),
    # layers
    ("linear", "dense fc fullyconnected innerproduct"),
    ("batch_norm", "batchnorm1d batchnorm2d bn batchnormalization syncbatchnorm"),
    ("layer_norm", "layernormalization ln"),
    ("attention", "multiheadattention multiheadselfattention mha selfattention"),
    ("transformer_block", "transformerencoderlayer transformerdecoderlayer encoderlayer decoderlayer transformerlayer"),
    ("max_pool2d", "maxpooling2d maxpool"),
    ("avg_pool2d", "averagepooling2d avgpool"),
    ("adaptive_avg_pool2d", "globalaveragepooling globalavgpool globalaveragepooling2d"),
    ("silu", "swish"),
    ("patch_embedding", "patchembed"),
    # networks
    ("transformers", "automodel automodelforcausallm automodelforsequenceclassification frompretrained huggingface hf "
     "qwen qwen2 gemma bert roberta t5 gptneox phi phi3 deepseek"),
    ("convnet", "cnn simplecnn lenet"),
    ("llama", "llama2 llama3 qwen3 mistral llamaforcausallm qwen3forcausallm"),
    ("gated_mlp", "swiglu glu geglu llamamlp"),
    ("llama_block", "llamadecoderlayer qwen3decoderlayer"),
    ("gpt", "transformer gpt2 gpt3 nanogpt transformerlm"),
    ("resnet", "resnet18 resnet34 resnet50 resnet101 resnet152"),
    ("vit", "visiontransformer vitbase vitb16"),
    ("mlp", "feedforward perceptron multilayerperceptron"),
    # sources
    ("datasets", "loaddataset huggingface hf hub csv json jsonl"),
    ("images", "imagefolder"),
    ("random_resized_crop", "randomresizedcroprgb resizedcrop rrc"),
    ("random_horizontal_flip", "horizontalflip hflip flip randomflip fliplr"),
    ("random_vertical_flip", "verticalflip vflip flipud"),
    ("random_rotation", "rotate rotation randomrotate"),
    ("color_jitter", "colourjitter jitter randombrightnesscontrast"),
    ("random_grayscale", "grayscale togray randomgray"),
    ("gaussian_blur", "blur randomgaussianblur"),
    ("rand_augment", "randaug randomaugment ra"),
    ("auto_augment", "autoaug"),
    ("trivial_augment_wide", "trivialaugment trivialaug ta ta_wide tawide"),
    ("aug_mix", "augmentandmix"),
    ("random_erasing", "erasing cutout coarsedropout randomerase"),
    ("random_affine", "affine shiftscalerotate"),
    ("center_crop", "centralcrop"),
    ("arrays", "npz npy numpy tensordataset"),
    ("tokens", "memmap bin indexeddataset"),
    ("text", "txt textfile plaintext"),
    ("synthetic", "random fake fakedata dummy"),
    ("python", "custom dataset module function"),
    # metrics
    ("accuracy", "acc accuracyscore top1 top1accuracy categoricalaccuracy"),
    ("top_k", "topkaccuracy top5 top5accuracy"),
    ("perplexity", "ppl"),
    # goals
    ("lowest", "min minimum minimize minimise earlystopping earlystoppingcallback modelcheckpoint"),
    ("highest", "max maximum maximize maximise"),
    # the rest
    ("interleaved_1f1b", "interleaved interleave"),
    ("gpipe", "fthenb afab fillanddrain"),
    ("zero_bubble", "zb zbh1 interleavedzerobubble zb1p"),
    ("zbv", "zbvzerobubble"),
    ("dualpipev", "dualpipe"),
    ("all", "cuda gpu gpus auto"),
    ("full", "all uniform block true"),
    ("auto", "latest last newest true"),
    ("optimizer", "optimizerstate optimizerstates cpu host"),
    ("slurm", "srun sbatch"),
    ("mpi", "mpirun openmpi"),
    ("local", "standard localhost"),
    ("kubernetes", "k8s kubeflow"),
    ("powersgd", "powersgdhook"),
    ("allreduce", "mean average sum"),
)  # fmt: skip

# (the message; the names of calls, spelt likewise)
_ABSENT_VALUES = (
    ("a network is a list of layers, as in `[flatten(), linear(10)]`", "sequential modulelist list"),
    ("`python(…)` takes an optimizer of your own, or of a library: `python(\"lion:Lion\", lr = 3e-4)`",
     "lion lion8bit pagedlion muon adafactor lamb lars prodigy schedulefree sophia shampoo soap adopt galore"),
    ("a picture is augmented alone; mixtures of several need targets of several classes: `train.step = python(…)` is a "
     "step of your own", "mixup cutmix mosaic"),
    ("pictures become numbers 0 … 1 by themselves, and `normalize` of the source normalises them",
     "totensor topiltoimage toimage todtype piltotensor convertimagedtype toimagetensor"),
    ("`augment` is a list of transforms: `augment = [random_horizontal_flip()]`", "compose"),
    ("`python(…)` takes a loss of your own", "smoothl1loss smoothl1 huber huberloss kldivloss kldiv ctcloss "
     "tripletmarginloss hingeloss focalloss dice diceloss cosineembeddingloss"),
)  # fmt: skip

# (the message; the names of commands)
_COMMANDS = (
    ("did you mean `dslc run`?", "train fit start launch exec execute pretrain finetune trainer sft"),
    ("did you mean `dslc check`?", "lint dry_run dryrun compile parse"),
    ("`dslc check` looks at a job, `dslc evaluate` at what it has trained", "validate test"),
    ("did you mean `dslc evaluate`?", "eval score val validation"),
    ("did you mean `dslc predict`?", "infer inference generate"),
    ("did you mean `dslc export`?", "convert save consolidate merge zero_to_fp32"),
    ("did you mean `dslc fmt`?", "format"),
    ("did you mean `dslc plan`?", "show describe summary estimate estimate_memory inspect"),
    ("did you mean `dslc render`?", "draw plot graph visualize picture"),
    ("did you mean `dslc new`?", "init create template config"),
    ("did you mean `dslc tokens`?", "tokenize preprocess prepare prepare_data"),
    ("did you mean `dslc schema`?", "reference docs"),
    ("`dslc run JOB --out DIR --set checkpoint.resume=auto` continues the run in DIR", "resume restart continue"),
    ("`dslc run` tries all that a block `sweep` of the job names", "sweep tune search"),
    ("it is `dslc --help`", "help"),
    ("it is `dslc --version`", "version"),
)  # fmt: skip

# (the message; the names of options without a field)
_OPTIONS = (
    ("`dslc run JOB --out DIR` names the run directory", "output o out d dir directory out_path output_path folder"),
    ("the job is named without an option: `dslc run JOB`", "config config_file config_path config_name c f file job "
     "recipe yaml"),
    ("`dslc check JOB` starts nothing, `dslc plan JOB` shows what each rank would do, and `dslc run JOB --try` takes a "
     "few steps", "dry_run dryrun check no_run"),
    ("a setting is `--set PATH=VALUE`", "override overrides settings opts options param params define key"),
    ("`dslc run` shows progress by itself", "quiet silent q v"),
)  # fmt: skip

# By name: the block meant by another block; the equivalent here with its differences; the message for a name without an
# equivalent; the message for one on the command line; and, by the spelling of a value, the words and calls that may be
# meant.
BLOCKS = {name: block for block, names in _BLOCKS for name in names.split()}
FIELDS = {name: (place, note) for place, note, names in _FIELDS for name in names.split()}
ABSENT = {name: said for said, names in _ABSENT for name in names.split()}
COMMANDS = {name: said for said, names in _COMMANDS for name in names.split()}
OPTIONS = {name: said for said, names in _OPTIONS for name in names.split()}
ABSENT_VALUES = {name: said for said, names in _ABSENT_VALUES for name in names.split()}
VALUES: dict[str, list[str]] = {}
for _word, _names in _VALUES:
    for _name in _names.split():
        VALUES.setdefault(_name, []).append(_word)
