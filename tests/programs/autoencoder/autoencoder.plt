# a variational autoencoder; its two losses are logged by name
model {
  network = python("autoencoder:Autoencoder")
  loss    = python("autoencoder:elbo")
}

data {
  source  = python("autoencoder:Pictures")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adam(lr = 3e-3)
}
