# Layers and calls as torch has them.
import "base/digits.plt"

model {
  network = [flatten(), linear(64, 128), relu, linear(128, 10)] #! E0134
  loss    = SmoothL1Loss() #! E0130
}

devices {
  gpus = cuda #! E0120
}

train {
  lr_schedule = ReduceLROnPlateau(patience = 3) #! E0130
}

memory {
  offload = cpu #! E0120
}

launch {
  with = torchrun(nproc_per_node = 4) #! E0131
}

parallelism {
  strategy          = fsdp #! E0107
  sharding_strategy = "FULL_SHARD" #! E0107
}
