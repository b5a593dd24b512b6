#pragma once

using cublasLtHandle_t = void*;
