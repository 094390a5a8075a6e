# A job with the fields of TrainingArguments.
import "base/digits.plt"

train {
  per_device_train_batch_size = 8 #! E0107
  gradient_accumulation_steps = 4 #! E0107
  warmup_ratio                = 0.03 #! E0107
  lr_scheduler_type           = "cosine" #! E0107
  bf16                        = true #! E0107
  gradient_checkpointing      = true #! E0107
  output_dir                  = "out" #! E0107
  load_best_model_at_end      = true #! E0107
  optimizer                   = "adamw_torch" #! E0121
}

evaluate {
  every   = 1 #! E0124
  metrics = ["accuracy", "f1"] #! E0121
}
