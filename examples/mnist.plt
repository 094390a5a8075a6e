# Handwritten digits from the files as they are published, shifted and turned at random by torchvision; `dslc check` says
# how to fetch them.
model {
  network = convnet(channels = [32, 64])
  loss    = cross_entropy()
}

data {
  source = mnist(
    "mnist",
    augment = [random_crop(28, padding = 2), random_rotation(10)],
    normalize = mnist,
  )
  batch = 128
}

devices {
  cpus = 2
}

train {
  epochs    = 3
  optimizer = adam(lr = 1e-3)
}

evaluate {
  metrics = [loss, accuracy]
}
