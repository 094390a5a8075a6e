param
param = 3
param "width" = 3
