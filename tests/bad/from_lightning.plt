# A job as someone writes it who comes from Lightning.
trainer { #! E0106
  accelerator = "gpu" #! E0107
  devices     = 4 #! E0107
  strategy    = "ddp" #! E0107
  max_epochs  = 3 #! E0107
  precision   = "16-mixed" #! E0121
  callbacks   = [EarlyStopping(monitor = "val_loss", patience = 3)] #! E0107
}

model {
  network = Sequential(Flatten(), Linear(64, 10)) #! E0130
  loss    = CrossEntropyLoss() #! E0130
}

data {
  source      = digits()
  batch_size  = 32 #! E0107
  num_workers = 4 #! E0107
}

optimizer { #! E0106
  name = "Adam"
  lr   = 1e-3
}
