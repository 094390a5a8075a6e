# a variational autoencoder, whose network returns its loss
model {
  network = python("vae:VAE")
  loss    = own()
}

data {
  source  = python("vae:Images")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adam(lr = 1e-3)
}
